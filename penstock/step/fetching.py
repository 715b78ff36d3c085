"""Weights of the next operation, fetched while engines compute.

An engine with memory of its own computes while the host prepares: the thread of the step queues the
work of one operation, and another thread applies the pending updates of the next one. With one
thread for both, an engine would wait wherever queueing and an update together take longer than its
computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from penstock.sparsity import StreamedWeight
from penstock.step_schedule import Operation

Fetch = Callable[[Operation], Sequence[StreamedWeight]]


class Fetches:
    """Fetches the weights of operations, one after the other; on request ahead of their use.

    Args:
        fetch: returns the weights of an operation; called by one thread at a time, in order.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._pool: ThreadPoolExecutor | None = None  # kept: kernels start threads for each thread
        self._started: tuple[Operation, Future[Sequence[StreamedWeight]]] | None = None
        self._fetched = self._waited = 0.0

    def start(self, operation: Operation) -> None:
        """Fetch the next operation's weights in another thread."""
        assert self._started is None
        if self._pool is None:
            self._pool = _make_pool()
        self._started = operation, self._pool.submit(self._timed, operation)

    def take(self, operation: Operation) -> Sequence[StreamedWeight]:
        """Return the weights of an operation; wait for them, or fetch them now.

        Raises:
            Exception: the errors of the fetch.
        """
        if self._started is None:
            return self._fetch(operation)
        (started, future), self._started = self._started, None
        assert started is operation
        begin = time.perf_counter()
        try:
            return future.result()
        finally:
            self._waited += time.perf_counter() - begin

    def finish(self) -> None:
        """Wait for a fetch that nobody took, and forget its weights or its error."""
        if self._started is not None:
            wait([self._started[1]])
            self._started = None

    def take_hidden_seconds(self) -> float:
        """Return how long fetches took beside other work since the last call."""
        hidden = max(0.0, self._fetched - self._waited)
        self._fetched = self._waited = 0.0
        return hidden

    def _timed(self, operation: Operation) -> Sequence[StreamedWeight]:
        begin = time.perf_counter()
        try:
            return self._fetch(operation)
        finally:
            self._fetched += time.perf_counter() - begin


def _make_pool() -> ThreadPoolExecutor:
    """Return one thread whose kernels use one core less than the caller's: the caller works too."""
    import numba

    count = max(1, numba.get_num_threads() - 1)
    return ThreadPoolExecutor(1, "fetch", numba.set_num_threads, (count,))
