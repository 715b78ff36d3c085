"""A disk held to a rate: what a loop would see of a slower one than is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Pace:
    """Lets so many bytes pass per second, reads and writes together, from any thread.

    What is not used is lost, as a disk's idle time is.

    Args:
        bytes_per_second: the rate; None does not hold anything up.
    """

    def __init__(self, bytes_per_second: int | None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the disk will have done all that it was given

    @contextmanager
    def moving(self, size_bytes: int) -> Iterator[None]:
        """Let the bytes be moved within; end when a disk of this rate would have moved them, behind
        those that were begun before."""
        if self._rate is None:
            yield
            return
        with self._lock:
            self._free_at = max(time.monotonic(), self._free_at) + size_bytes / self._rate
            done_at = self._free_at
        yield
        time.sleep(max(0.0, done_at - time.monotonic()))
