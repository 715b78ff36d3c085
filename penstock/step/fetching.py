"""Weights of the next operation, fetched while engines compute, and other work of that time.

An engine with memory of its own computes while the host prepares: the thread of the step queues the
work of one operation, and another thread applies the pending updates of the next one. With one
thread for both, an engine would wait wherever queueing and an update together take longer than its
computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from penstock.spans import Clock
from penstock.sparsity import StreamedWeight
from penstock.step_schedule import Operation

Fetch = Callable[[Operation], Sequence[StreamedWeight]]
Result = TypeVar("Result")


class Fetches:
    """Fetches the weights of operations, one after the other; on request ahead of their use.

    Args:
        fetch: returns the weights of an operation; called by one thread at a time, in order.
        clock: returns seconds.
    """

    def __init__(self, fetch: Fetch, clock: Clock = time.perf_counter) -> None:
        self._fetch, self._clock = fetch, clock
        self._pool: ThreadPoolExecutor | None = None  # kept: kernels start threads for each thread
        self._started: tuple[Operation, Future[Sequence[StreamedWeight]]] | None = None
        self._worked = self._waited = 0.0
        self._last = (0.0, 0.0)  # begin and end of the last work
        self._has_slack = False

    def start(self, operation: Operation) -> None:
        """Fetch the next operation's weights in another thread."""
        assert self._started is None
        self._started = operation, self.submit(lambda: self._fetch(operation))

    def is_ready(self) -> bool:
        """Return whether the fetch that was started has ended, or is expected to before it is
        needed: the last one had ended for longer than it took."""
        return self._started is not None and (self._has_slack or self._started[1].done())

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Do work in the thread of the fetches, after what was started before."""
        if self._pool is None:
            self._pool = _make_pool()
        return self._pool.submit(self._timed, work)

    def result(self, work: Future[Result]) -> Result:
        """Wait for work and return its result.

        Raises:
            Exception: the errors of the work.
        """
        begin = self._clock()
        try:
            return work.result()
        finally:
            self._waited += self._clock() - begin

    def take(self, operation: Operation) -> Sequence[StreamedWeight]:
        """Return the weights of an operation; wait for them, or fetch them now.

        Raises:
            Exception: the errors of the fetch.
        """
        now = self._clock()
        if self._started is None:
            self._has_slack = False
            return self._fetch(operation)
        (started, future), self._started = self._started, None
        assert started is operation
        weights = self.result(future)
        begin, end = self._last
        self._has_slack = now - end > end - begin
        return weights

    def finish(self) -> None:
        """Wait for a fetch that nobody took, and forget its weights or its error."""
        if self._started is not None:
            wait([self._started[1]])
            self._started = None

    def take_hidden_seconds(self) -> float:
        """Return how long work of this thread took beside other work since the last call."""
        hidden = max(0.0, self._worked - self._waited)
        self._worked = self._waited = 0.0
        return hidden

    def _timed(self, work: Callable[[], Result]) -> Result:
        begin = self._clock()
        try:
            return work()
        finally:
            self._last = begin, self._clock()
            self._worked += self._last[1] - begin


def _make_pool() -> ThreadPoolExecutor:
    """Return one thread whose kernels use one core less than the caller's: the caller works too."""
    import numba

    count = max(1, numba.get_num_threads() - 1)
    return ThreadPoolExecutor(1, "fetch", numba.set_num_threads, (count,))
