"""What the trainer's thread and the threads of a run's connections tell each other: events, the
run's fatal error, and a request to stop."""

import queue
from collections import Counter
from collections.abc import Callable

from penstock.errors import ClusterError, PenstockError
from penstock.telemetry import ClusterEvent


class EventQueue:
    """Any thread writes events; the trainer's thread reads them.

    Args:
        tell: called with one line per event, by the thread that polls.
        should_stop: returns whether waiting for other processes should end.
    """

    def __init__(
        self, tell: Callable[[ClusterEvent], None], should_stop: Callable[[], bool]
    ) -> None:
        self.step = 0  # the run's current step
        self.counts: Counter[str] = Counter()
        self._on_event, self.should_stop = tell, should_stop
        self._queued: queue.SimpleQueue[ClusterEvent] = queue.SimpleQueue()
        self._error: PenstockError | None = None
        self.is_closed = False  # whether the processes have been released

    def emit(
        self, kind: str, text: str, node: int | None = None, *, engines: int | None = None
    ) -> None:
        """Queue an event, and count it."""
        self.counts[kind] += 1
        self._queued.put(ClusterEvent(kind, text, node, self.step, engines))

    def fail(self, error: PenstockError) -> None:
        """End the run with an error; only the first error is kept."""
        self._error = self._error or error

    @property
    def has_failed(self) -> bool:
        """Whether the run has failed."""
        return self._error is not None

    def poll(self) -> None:
        """Report queued events in this thread, then raise the error that ended the run, if any."""
        self.report_all()
        self.require_sound()

    def require_sound(self) -> None:
        """Raise the error that ended the run, if any."""
        if self._error is not None:
            raise self._error
        if self.is_closed:
            raise ClusterError("the connections to the run's processes are closed")

    def report_all(self) -> None:
        """Report queued events in this thread."""
        while not self._queued.empty():
            self._on_event(self._queued.get())
