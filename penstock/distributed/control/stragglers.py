"""Which engine is slower than the others, and stays so.

All engines do the same work per micro-batch, so what one takes for it is compared with the median
of all. A step waits for the slowest of its engines: one of half the speed halves the run's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

_LEAST_SECONDS = 1.0  # of computing, over which speeds are compared; less is noise


@dataclass(frozen=True)
class Slow:
    """An engine that is slow now: how many times as long it takes, and for how many looks."""

    engine: int
    times: float
    looks: int


class Stragglers:
    """Compares engines' speeds from what each has computed so far.

    Args:
        factor: an engine that takes more than so many times the median is slow.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._before: dict[int, tuple[float, int]] = {}
        self._slow: dict[int, int] = {}

    def look(self, computed: Mapping[int, tuple[float, int]]) -> list[Slow]:
        """Return who is slow, after a step.

        Args:
            computed: for every engine of the step, seconds and micro-batches since it began.
        """
        self._slow = {engine: looks for engine, looks in self._slow.items() if engine in computed}
        if set(computed) - set(self._before):
            self._before = {
                engine: self._before.get(engine, computed[engine]) for engine in computed
            }
        pace: dict[int, float] = {}
        for engine, (seconds, count) in computed.items():
            old_seconds, old_count = self._before[engine]
            if count - old_count < 1 or seconds - old_seconds < _LEAST_SECONDS:
                continue
            pace[engine] = (seconds - old_seconds) / (count - old_count)
        if len(pace) < max(2, len(computed)):
            return []  # not all have computed for long enough
        self._before = dict(computed)
        # Of two, the median would be halfway to the slow one.
        usual = statistics.median_low(pace.values())
        found = []
        for engine, own in pace.items():
            if own <= self._factor * usual:
                self._slow.pop(engine, None)
                continue
            self._slow[engine] = self._slow.get(engine, 0) + 1
            found.append(Slow(engine, own / usual, self._slow[engine]))
        return found
