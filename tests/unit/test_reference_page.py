"""The tables of the Python reference name what its directives document, and all of it exists."""

import re
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from penstock import errors, telemetry

PAGE = (Path(__file__).parents[2] / "docs/reference.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def listed(section):
    """The names in the first column of a section's tables, without the arguments."""
    cells = [line.split(" | ")[0] for line in SECTIONS[section].splitlines() if line[:3] == "| `"]
    return [name for cell in cells for name in re.findall(r"`([\w.]+)", cell)]


def documented(section):
    """Each name that a section's directives document, with the object."""
    directive = r"^::: ([\w.]+)\n(?:    options:\n      members: \[(.*)\])?"
    found = {}
    for path, members in re.findall(directive, SECTIONS[section], re.MULTILINE):
        module, _, name = path.rpartition(".")
        names = members.split(", ") if members else []
        if name in ("events", "errors"):
            found |= {member: getattr(import_module(path), member) for member in names}
            continue
        named = found[name] = getattr(import_module(module), name)
        found |= {f"{name}.{member}": getattr(named, member) for member in names}
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_tables_name_what_the_directives_document(section):
    assert sorted(listed(section)) == sorted(documented(section))


def test_tables_name_every_error_with_its_exit_code():
    values = vars(errors).values()
    classes = [each for each in values if getattr(each, "__module__", "") == errors.__name__]
    classes = [each for each in classes if isinstance(each, type)]
    rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", SECTIONS["Errors"], re.MULTILINE))
    assert {name: int(code) for name, code in rows.items()} == {
        each.__name__: each.exit_code for each in classes
    }


def test_tables_name_every_event():
    names = {event.__name__ for event in get_args(telemetry.Event)}
    assert set(listed("Events")) == names | {"Event", "Listener"}


def test_imports_of_the_page_work():
    table = PAGE.partition("A complete example")[0]
    lines = re.findall(r"^\| `(from [^`]+)`", table, re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        exec(line.replace(", ...", "").replace("import ...", "import *"), {})
