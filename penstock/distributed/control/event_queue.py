"""Events of a run's processes, queued for the trainer's thread, and the error that ended it."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable

from penstock.errors import ClusterError, PenstockError
from penstock.telemetry import ClusterEvent


class EventQueue:
    """Written in any thread, told in the trainer's.

    Args:
        tell: is told what happens, one line at a time, by the thread that looks.
    """

    def __init__(self, tell: Callable[[ClusterEvent], None]) -> None:
        self.step = 0  # at which the run stands
        self.counts: Counter[str] = Counter()
        self._tell = tell
        self._untold: queue.SimpleQueue[ClusterEvent] = queue.SimpleQueue()
        self._failed: PenstockError | None = None
        self.is_over = False  # whether the processes have been let go of

    def emit(self, kind: str, text: str, node: int | None = None) -> None:
        """Tell of something that has happened, and count it."""
        self.counts[kind] += 1
        self._untold.put(ClusterEvent(kind, text, node, self.step))

    def fail(self, error: PenstockError) -> None:
        """End the run with an error; the first one counts."""
        self._failed = self._failed or error

    @property
    def has_failed(self) -> bool:
        """Whether it is impossible to go on."""
        return self._failed is not None

    def poll(self) -> None:
        """Tell what has happened, in this thread, and raise what ends the run."""
        self.tell_all()
        self.require_sound()

    def require_sound(self) -> None:
        """Raise what makes it impossible to go on, if there is anything."""
        if self._failed is not None:
            raise self._failed
        if self.is_over:
            raise ClusterError("the run's processes have been let go of")

    def tell_all(self) -> None:
        """Tell what has happened, in this thread."""
        while not self._untold.empty():
            self._tell(self._untold.get())
