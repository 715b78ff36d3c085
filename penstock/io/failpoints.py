"""Failpoints: named places where a test may kill the process, to show that data on disk survives.

Code that makes data durable calls `failpoints.point("checkpoint.before_rename")` between any two
steps that a crash could separate. A point does nothing unless a test watches it with `watching`, or
the environment variable `PENSTOCK_FAULT=name[:n]` says that the process is killed there, at the
n-th visit of the point (the first, without a number).
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENVIRONMENT_VARIABLE = "PENSTOCK_FAULT"


def point(name: str) -> None:
    """Mark a place between two steps of a protocol; almost free unless a test watches it."""
    if _watcher is not None:
        _watcher(name)


@contextmanager
def watching(watcher: Callable[[str], None]) -> Iterator[None]:
    """Call `watcher(name)` at every point that is reached inside the `with` block."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


def killer(name: str, count: int = 1) -> Callable[[str], None]:
    """Return a watcher that kills this process with SIGKILL at a point's `count`-th visit."""
    remaining = count

    def watcher(reached: str) -> None:
        nonlocal remaining
        if reached == name:
            remaining -= 1
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return watcher


def _from_environment() -> Callable[[str], None] | None:
    order = os.environ.get(ENVIRONMENT_VARIABLE)
    if not order:
        return None
    name, _, count = order.partition(":")
    return killer(name, int(count) if count else 1)


_watcher = _from_environment()
