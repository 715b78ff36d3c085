"""A run of a store on flash that crashes twice, and what must be there each time it is opened."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crash_disk import CrashDisk

from penstock.errors import PenstockError


def crash_and_go_on(
    root: Path,
    crash_at: int,
    seed: int,
    opened: Callable[[Path], Any],
    run: Callable[[Any], object],
    expected: tuple[int, str],
) -> None:
    """Crash at an operation, reopen, crash again, reopen and finish; the bits must be there.

    **Arguments:** `opened` opens the store in a folder, `run` trains it to its end; `expected` are
    the step and the hash of the weights at that end.
    """
    promised = None
    root.mkdir()
    for attempt in range(3):
        last = attempt == 2
        with CrashDisk(root, None if last else crash_at, seed + attempt) as disk:
            store = None
            try:
                store = opened(root / "flash")
                if promised is not None:
                    assert store.durable_step is not None, "the store forgot that it was durable"
                    assert store.durable_step >= promised, "a durable step was lost"
                run(store)
            except (PenstockError, OSError):
                if not disk.crashed:
                    raise
            finally:
                if store is not None:
                    if not store.is_new and store.durable_step is not None:
                        promised = max(promised or 0, store.durable_step)
                    if last:
                        assert (store.step, store.content_hash()) == expected
                    store.close()
        disk.lose()
    shutil.rmtree(root)
