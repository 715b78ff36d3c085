"""The tables of the Python reference name what its directives document, and all of it exists."""

import ast
import inspect
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


def printed_calls(section):
    """The calls in the first column of a section's tables: each name with its arguments."""
    cells = [line.split(" | ")[0] for line in SECTIONS[section].splitlines() if line[:3] == "| `"]
    return [call for cell in cells for call in re.findall(r"`([\w.]+)\((.*?)\)`", cell)]


@pytest.mark.parametrize("section", SECTIONS)
def test_tables_print_the_real_arguments(section):
    objects = documented(section)
    for name, printed in printed_calls(section):
        real = dict(inspect.signature(objects[name]).parameters)
        real.pop("self", None)
        arguments = printed.split(", ") if printed else []
        takes_more = real.pop("options", None) is not None  # listed in the docstring
        required = [one.name for one in real.values() if one.default is one.empty]
        if "..." in arguments:
            arguments.remove("...")
            required = []
        elif any(argument.startswith('"') for argument in arguments):
            assert len(arguments) == len(required) == 1, name
            continue
        for place, argument in enumerate(arguments):
            key, equals, default = argument.partition("=")
            if takes_more and key not in real:
                assert f"`{key}`" in objects[name].__doc__, f"{name} has no option {key}"
                continue
            assert key in real, f"{name} has no argument {key}"
            if not equals:
                assert [*real][place] == key, f"{key} of {name} has another place"
            elif default != "...":
                assert real[key].default == ast.literal_eval(default), f"default of {key}, {name}"
        named = [argument.partition("=")[0] for argument in arguments]
        assert set(required) <= set(named), name


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
