"""Imports of heavy libraries by a command that answers in seconds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Run imports without the cyclic garbage collector.

    The objects of modules live as long as the process. While torch is imported, the collector
    traverses all of them repeatedly and frees almost nothing, and once more at exit. The imported
    objects are therefore excluded from later collections too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
