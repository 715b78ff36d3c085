"""The lock that guards what the threads of a flash store share, and the error that ended one.

A change of the state wakes every waiting thread. An error in a thread stops all threads and is
raised to the caller.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from penstock.errors import PenstockError, StorageError
from penstock.spans import Spans


class Monitor:
    """A lock with one condition; `spans` measures the waits of the caller.

    **Arguments:** `path` is the file that an error names.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.changed = threading.Condition()
        self.spans = Spans()
        self._error: BaseException | None = None
        self._closing = False

    @property
    def is_ending(self) -> bool:
        """Whether the threads have to end."""
        return self._closing or self._error is not None

    def start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Start and return a thread; an error that it raises is kept for the caller."""
        thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        thread.start()
        return thread

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self.changed:
                self._error = self._error or error
                self.changed.notify_all()

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Wait for a condition under the lock; raise the error of a stopped thread.

        **Raises:** `StorageError` if the store is closed, so that the condition may never hold.
        """
        if not is_so():
            with self.spans.span("flash", "wait"):
                self.changed.wait_for(lambda: self.is_ending or is_so())
        if self._error is not None:
            if isinstance(self._error, PenstockError):
                raise self._error
            raise StorageError(
                f"{self._path}: the store stopped: {self._error}; open the run again: it "
                "continues from the last durable step"
            ) from self._error
        if self._closing and not is_so():
            raise StorageError(
                f"{self._path}: the store is closed; open the run again: it continues from the "
                "last durable step"
            )

    def close(self) -> None:
        """Tell the threads to end."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
