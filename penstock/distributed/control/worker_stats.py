"""Statistics from heartbeats: memory, computing time, stragglers."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.distributed.control_messages import WorkerMetrics
from penstock.distributed.protocol import Message


class HeartbeatStats:
    """The last words of every node."""

    def __init__(self) -> None:
        self.peak_bytes = 0  # the most that any engine has said to have held
        self._figures: dict[int, WorkerMetrics] = {}
        self._rested: dict[int, int] = {}  # the epoch in which a node was last without work

    def take(self, message: Message) -> None:
        """Take a beat.

        **Raises:** `ProtocolError` if it makes no sense.
        """
        figures = WorkerMetrics.read(message)
        if not message.body.get("busy"):
            self._rested[message.sender] = message.epoch
        if figures is not None:
            self._figures[message.sender] = figures
            self.peak_bytes = max(self.peak_bytes, figures.peak_bytes)

    def forget(self, node: int) -> None:
        """Keep nothing of a node that is gone."""
        self._figures.pop(node, None)
        self._rested.pop(node, None)

    def figures(self, engines: Iterable[int]) -> dict[int, WorkerMetrics]:
        """Return what engines have last said of themselves."""
        return {engine: self._figures.get(engine, WorkerMetrics()) for engine in engines}

    def are_idle(self, nodes: Collection[int], epoch: int) -> bool:
        """Tell whether all of them have been without work in this epoch, or a later one."""
        return all(self._rested.get(node, -1) >= epoch for node in nodes)


class ComputeTimer:
    """Divides what engines have computed over the steps.

    A beat is up to a tenth of a second old: what it does not say yet counts for the next step, so
    that the sum over a run is right where single steps are not exact.
    """

    def __init__(self) -> None:
        self._before: dict[int, float] = {}
        self._left = 0.0  # computed in steps that had fewer seconds

    def of_step(self, said: Mapping[int, WorkerMetrics], seconds: float) -> float:
        """Return in how many seconds of a step its slowest engine has computed.

        Args:
            said: by the engines of the step.
            seconds: the length of the step.
        """
        new = [each.computed - self._before.get(engine, 0.0) for engine, each in said.items()]
        self._before = {engine: each.computed for engine, each in said.items()}
        computed = self._left + max(new, default=0.0)
        self._left = max(0.0, computed - seconds)
        return min(computed, seconds)


_LEAST_SECONDS = 1.0  # of computing, over which speeds are compared; less is noise


@dataclass(frozen=True)
class Straggler:
    """An engine that is slow now: how many times as long it takes, and for how many looks."""

    engine: int
    times: float
    looks: int


class StragglerDetector:
    """Compares engines' speeds from what each has computed so far.

    Args:
        factor: an engine that takes more than so many times the median is slow.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._before: dict[int, tuple[float, int]] = {}
        self._slow: dict[int, int] = {}

    def look(self, computed: Mapping[int, tuple[float, int]]) -> list[Straggler]:
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
            found.append(Straggler(engine, own / usual, self._slow[engine]))
        return found
