"""Waiting for what another thread or process does: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

# What a test gives up after. Nothing that is awaited takes a hundredth of it on an idle machine; on
# a busy one a process may not run for seconds.
SECONDS = 60.0


def wait_until(is_so: Callable[[], Found], what: object = "it", seconds: float = SECONDS) -> Found:
    """Return what `is_so` returns as soon as that is true; fail after `seconds`, naming `what`."""
    deadline = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.005)
    return found
