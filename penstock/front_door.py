"""Lazy exports of a package: a name is imported at first use.

Light commands (`penstock --help`, `penstock scale`) and the fork server start fast, because
importing a package does not import the modules of its other names.
"""

import ast
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.garbage_collection import collection_disabled


def lazily(package: str, file: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package for the names that it imports `if TYPE_CHECKING`.

    The names are read from the source of the package. So each is listed once, in the form that type
    checkers and the import linter read too.

    Args:
        package: `__name__` of the package.
        file: `__file__` of the package.
    """

    @cache
    def modules() -> dict[str, str]:
        return {
            alias.name: statement.module
            for block in ast.parse(Path(file).read_bytes()).body
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for statement in block.body
            if isinstance(statement, ast.ImportFrom) and statement.module
            for alias in statement.names
        }

    def load(name: str) -> Any:
        module = modules().get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with collection_disabled():
            if module == package:
                return import_module(f"{package}.{name}")
            return getattr(import_module(module), name)

    return load
