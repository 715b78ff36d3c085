"""Who imports from a folder takes what its `__init__` names, and nothing behind it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    ".".join(path.parent.relative_to(ROOT).parts): path
    for path in sorted((ROOT / "penstock").rglob("__init__.py"))
}
# Whose modules are the names that others may use: one that is imported loads a compiler (kernels),
# or more than the fork server may have (distributed).
MODULES_ARE_NAMES = {"penstock", "penstock.kernels", "penstock.distributed"}
# The demo is one more command. A worker's `main` is a module and a function of one name.
ALLOWED = {
    ("penstock.demo", "penstock.cli"),
    ("penstock.cluster", "penstock.distributed.worker"),
    ("penstock.distributed.launchers", "penstock.distributed.worker"),
}


def files() -> list[Path]:
    return sorted((ROOT / "penstock").rglob("*.py"))


def names_of(package: str) -> set[str]:
    """What a package imports as the same name (`from module import name as name`)."""
    return {
        alias.name
        for node in ast.walk(ast.parse(PACKAGES[package].read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }


def taken(source: str) -> Iterator[tuple[str, str | None, int]]:
    """For every import of a source: package, the name that is taken of it, line.

    The name is None where a module within the package is imported from.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("penstock"):
            continue
        module = node.module or ""
        if module in PACKAGES:
            for alias in node.names:
                if f"{module}.{alias.name}" not in PACKAGES:
                    yield module, alias.name, node.lineno
        else:
            yield module.rpartition(".")[0], None, node.lineno


def past_the_door(importer: str, source: str) -> list[str]:
    """The imports of a module of a package that a front door does not offer."""
    found = []
    for package, name, line in taken(source):
        inside = importer == package or importer.startswith(f"{package}.")
        if inside or package in MODULES_ARE_NAMES or (importer, package) in ALLOWED:
            continue
        if name is None or name not in names_of(package):
            found.append(f"line {line}: {name or 'a module'} of {package}")
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_through_front_doors(path):
    importer = ".".join(path.parent.relative_to(ROOT).parts)
    assert past_the_door(importer, path.read_text()) == []


def test_an_import_past_a_front_door_is_found():
    source = "from penstock.engine.slots import make_slots\nfrom penstock.store import nothing"
    assert past_the_door("penstock.training", source) == [
        "line 1: a module of penstock.engine",
        "line 2: nothing of penstock.store",
    ]


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "penstock.cluster"])
def test_names_of_a_front_door_exist(package):
    module = importlib.import_module(package)
    for name in names_of(package):
        assert hasattr(module, name), name
