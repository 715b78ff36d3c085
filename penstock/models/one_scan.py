"""Imports `transformers` with one scan of its models instead of two.

The library reads its source files of models, 1,700 of them, to learn which names they export: for
its package, and again for `transformers.models` (`docs/decisions.md` has the time). It keeps the
result of a folder, but asks for the second under the name of a file in it.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SCAN = "create_import_structure_from_path"


@contextmanager
def scanned_once() -> Iterator[None]:
    """Context of the first import of a model of `transformers`; without effect if a release of the
    library scans in another way."""
    from transformers.utils import import_utils

    scan: Callable[..., Any] | None = getattr(import_utils, _SCAN, None)
    if scan is None:
        yield
        return

    @functools.wraps(scan)
    def scan_folder(module_path: str | os.PathLike[str]) -> Any:
        path = Path(module_path)
        return scan(path.parent if path.is_file() else path)

    setattr(import_utils, _SCAN, scan_folder)
    try:
        yield
    finally:
        setattr(import_utils, _SCAN, scan)
