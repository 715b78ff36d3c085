"""Since when a step has not got on."""

from __future__ import annotations

from typing import Any


class Motion:
    """Compares what is seen of a step at one time and the next."""

    def __init__(self) -> None:
        self._since = 0.0
        self._seen: Any = None

    def begin(self, now: float) -> None:
        """Count from now on."""
        self._since = now

    def pause(self, seconds: float) -> None:
        """Leave out a time in which nothing could be seen."""
        self._since += seconds

    def still(self, now: float, seen: Any) -> float:
        """Return for how many seconds all that is seen has been as it is."""
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since
