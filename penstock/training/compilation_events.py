"""Events of compilation: a step that compiles kernels takes seconds longer than the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from penstock.kernels.code_cache import calling_before_compilation
from penstock.telemetry import FIRST_STEPS, Compiling, Listener


class CompilationEvents:
    """Reports to a listener that kernels are compiled which are not in the cache.

    There is one event for the start and the first steps of a run, and another for kernels that a
    later step is the first to need. A thread of its own calls the listener: the thread that
    compiles has Numba's lock, for which another thread may wait that the listener waits for.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._told_at: int | None = None
        self._failure: BaseException | None = None

    @contextmanager
    def reported(self, step: Callable[[], int]) -> Iterator[None]:
        """Report the compilations inside the block; `step` returns the number of committed steps.

        **Raises:** what the listener has raised, unless `raise_failure` did.
        """
        compilations: SimpleQueue[bool] = SimpleQueue()

        def report() -> None:
            try:
                while compilations.get():
                    self._tell(step())
            except BaseException as failure:
                self._failure = failure

        thread = threading.Thread(target=report, name="penstock compilations", daemon=True)
        thread.start()
        try:
            with calling_before_compilation(lambda: compilations.put(True)):
                yield
        finally:
            compilations.put(False)
            thread.join()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what the listener has raised, if it has: to be called after each step."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _tell(self, step: int) -> None:
        is_first = self._told_at is None
        if self._told_at is None or step >= self._told_at + FIRST_STEPS:
            self._told_at = step
            self._listener(Compiling(step, again=not is_first))
