"""Events of compilation: a step that compiles kernels takes seconds longer than the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.kernels.code_cache import calling_before_compilation
from penstock.telemetry import FIRST_STEPS, Compiling, Listener


@contextmanager
def reported_compilation(listener: Listener, step: Callable[[], int]) -> Iterator[None]:
    """Report inside the block that kernels are compiled which are not in the cache.

    `step` returns the number of committed steps. There is one event for the first steps, and
    another for kernels that a later step is the first to need.
    """
    told_at: int | None = None

    def tell() -> None:
        nonlocal told_at
        is_first = told_at is None
        if told_at is None or step() >= told_at + FIRST_STEPS:
            told_at = step()
            listener(Compiling(told_at, again=not is_first))

    with calling_before_compilation(tell):
        yield
