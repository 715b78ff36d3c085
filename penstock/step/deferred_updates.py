"""How many updates a step defers, and the thread that makes them while engines compute.

Updates are pending after a commit, and the forward sweep waits for each. An engine with memory of
its own computes for longer in the backward sweep, in which nothing is pending, and the host waits
there for gradients. So a store in memory may compute only the streamed values of the first weights
in the forward sweep, and update these weights in the backward sweep (`DramStore.defer`). The whole
takes more of the host's time, so it is done only as far as the host has waited before.
"""

import time
from concurrent.futures import Future, wait

from penstock.step.fetching import Fetches
from penstock.step_schedule import Operation
from penstock.store import DefersUpdates

SHARE = 0.8
"""Of the time that the host waits for gradients, the part that updates may take."""

LATE = 0.01
"""Share of a step for which its forward sweep may wait for updates, of which none is deferred."""

LEAST = 0.1
"""Share of a model below which deferring updates is not worth it."""


class DeferredUpdates:
    """Defers updates of a store, as measured in the last step.

    Args:
        store: nothing is deferred if it cannot stream weights early.
        fetches: has the thread that makes the updates.
    """

    def __init__(self, store: object, fetches: Fetches) -> None:
        self._store = store if isinstance(store, DefersUpdates) else None
        self._fetches = fetches
        self._making: dict[int, Future[None]] = {}  # by operation
        self._elements = 0  # to defer in each step
        self._blocked_seconds = 0.0  # of the current step

    def begin(self) -> None:
        """Forget what was measured of a step that has failed."""
        self._blocked_seconds = 0.0
        if self._store is not None:
            self._store.take_update_times()

    def start(self, operation: Operation) -> None:
        """Make the deferred updates of an operation's weights, in another thread: the operation is
        about to be computed, and its gradients will follow."""
        if self._store is not None and self._store.early_elements and operation.gradients:
            store, stage = self._store, operation.stage
            self._making[operation.number] = self._fetches.submit(
                lambda: store.make_deferred(stage)
            )

    def finish(self, operation: Operation) -> None:
        """Wait for the updates of an operation's weights.

        Raises:
            Exception: the errors of the store.
        """
        making = self._making.pop(operation.number, None)
        if making is not None:
            begin = time.perf_counter()
            self._fetches.result(making)
            self._blocked_seconds += time.perf_counter() - begin

    def abandon(self) -> None:
        """Wait for all updates of a step that has failed; their errors are not raised."""
        wait(self._making.values())
        self._making.clear()

    def measured(self, seconds: float, late_seconds: float, spare_seconds: float) -> float:
        """Choose how many updates the next step defers.

        Args:
            seconds: of the last step.
            late_seconds: in which its forward sweep waited for weights.
            spare_seconds: in which its backward sweep waited for gradients.

        Returns:
            The seconds in which received gradients waited for an update that had begun.
        """
        blocked, self._blocked_seconds = self._blocked_seconds, 0.0
        if self._store is None:
            return 0.0
        times = self._store.take_update_times()
        all_elements = self._store.early_elements
        if not all_elements or not times.elements or times.seconds <= 0:
            return times.blocked_seconds
        # Updates are made beside the wait for gradients; they shorten it as far as gradients wait
        # for them.
        spare_seconds += blocked + times.blocked_seconds
        possible = SHARE * spare_seconds * times.elements / times.seconds
        is_worth_it = self._elements or late_seconds > LATE * seconds
        if not is_worth_it or possible < LEAST * all_elements:
            possible = 0
        self._elements = min(int(possible), all_elements)
        self._store.defer(self._elements)
        return times.blocked_seconds
