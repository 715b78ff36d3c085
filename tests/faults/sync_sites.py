"""Where the code syncs: each call, found by reading the source, and the one that is being made.

A sync is reached through functions that exist to make things durable (`BLOCKS`): `replace_file`
calls `sync_folder`, which calls `sync`. Each of these calls is a site. A chain of them, from the
system call up to the first function outside, is what can be left out on its own: the sync of the
folder in `replace_file` when the journal is made is another than when the index is.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import penstock

SOURCE = Path(penstock.__file__).parent
SYSTEM = ("fsync", "fdatasync", "sync", "syncfs", "sync_file_range", "msync")  # of os or mmap
BLOCKS = (
    "io/durable.py",
    "store/files.py",
    "store/tensor_file.py",
    "store/flash/medium.py",
)

MEASURING = ("calibration/disk_cases.py",)  # syncs to measure them; nothing must survive


@functools.cache
def _home(module: str, name: str) -> str:
    """Return the file that defines a name which a module or a front door exports."""
    folder = SOURCE / module
    if not folder.is_dir():
        return f"{module}.py"
    for path in sorted(folder.rglob("*.py")):
        if any(getattr(node, "name", None) == name for node in _tree(path).body):
            return path.relative_to(SOURCE).as_posix()
    return f"{module}/__init__.py"


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


class Module:
    """A file of the source: its calls, by the function that they are in, and what it imports."""

    def __init__(self, path: Path) -> None:
        self.name = path.relative_to(SOURCE).as_posix()
        self.calls: list[tuple[str, ast.Call]] = []
        self.methods: set[str] = set()
        self.imported: dict[str, tuple[str, str | None]] = {}  # module, and what of it
        self._visit(_tree(path), "", False)

    def _visit(self, node: ast.AST, function: str, in_class: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if in_class:
                    self.methods.add(child.name)
                self._visit(child, child.name, False)
                continue
            if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("penstock"):
                self._import(child)
            if isinstance(child, ast.Call):
                self.calls.append((function, child))
            self._visit(child, function, isinstance(child, ast.ClassDef))

    def _import(self, node: ast.ImportFrom) -> None:
        above = "/".join((node.module or "").split(".")[1:])
        for alias in node.names:
            inner = f"{above}/{alias.name}.py".lstrip("/")
            is_module = (SOURCE / inner).exists()
            where = (inner, None) if is_module else (_home(above, alias.name), alias.name)
            self.imported[alias.asname or alias.name] = where

    def syncs(self, call: ast.Call, syncing: set[tuple[str, str]]) -> bool:
        """Whether a call goes to the system, or to one of these functions of these modules."""
        called = call.func
        if isinstance(called, ast.Name):
            known = self.imported.get(called.id, (self.name, called.id))
            return known in syncing
        if not isinstance(called, ast.Attribute):
            return False
        holder = called.value.id if isinstance(called.value, ast.Name) else ""
        if holder in ("os", "mmap"):
            return called.attr in SYSTEM
        if holder in self.imported and self.imported[holder][1] is None:
            return (self.imported[holder][0], called.attr) in syncing
        # A method: of which class is not known, so of any that this module can see.
        seen = {self.name, *(module for module, _ in self.imported.values())}
        return any(
            (module, called.attr) in syncing and called.attr in _modules()[module].methods
            for module in seen & set(BLOCKS)
        )


@functools.cache
def _modules() -> dict[str, Module]:
    found = [Module(path) for path in sorted(SOURCE.rglob("*.py"))]
    return {module.name: module for module in found}


@functools.cache
def _syncing() -> set[tuple[str, str]]:
    """Return the functions of the blocks that sync, as module and name."""
    found: set[tuple[str, str]] = set()
    while True:
        more = {
            (name, function)
            for name in BLOCKS
            for function, call in _modules()[name].calls
            if _modules()[name].syncs(call, found)
        }
        if more <= found:
            return found
        found |= more


@functools.cache
def _sites() -> dict[tuple[str, int], str]:
    """Return the name of every site, by module and line."""
    found: dict[tuple[str, int], str] = {}
    for module in _modules().values():
        if module.name in MEASURING:
            continue
        count: dict[str, int] = {}
        for function, call in module.calls:
            if module.syncs(call, _syncing()):
                text = f"{module.name[:-3]}.{function}: {ast.unparse(call.func)}"
                count[text] = count.get(text, 0) + 1
                suffix = f" #{count[text]}" if count[text] > 1 else ""
                for line in range(call.lineno, (call.end_lineno or call.lineno) + 1):
                    found.setdefault((module.name, line), text + suffix)
    return found


def all_sites() -> set[str]:
    """Return the names of all calls in the source that sync, or that may."""
    return set(_sites().values())


def site_chain() -> str:
    """Return the sites through which the sync is reached that is being made now."""
    return " < ".join(_chain())


def _chain() -> Iterator[str]:
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCE):
            module = path.relative_to(SOURCE).as_posix()
            site = _sites().get((module, frame.f_lineno))
            if site is None:
                return
            yield site
            if (module, frame.f_code.co_name) not in _syncing():
                return
        frame = frame.f_back
