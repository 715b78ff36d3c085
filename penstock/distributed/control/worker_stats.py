"""Statistics from heartbeats: memory, computing time, stragglers."""

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.distributed.control_messages import WorkerMetrics
from penstock.distributed.protocol import Message


class HeartbeatStats:
    """The latest heartbeat of every node."""

    def __init__(self) -> None:
        self.peak_bytes = 0  # the highest peak that any engine has reported
        self._figures: dict[int, WorkerMetrics] = {}
        self._idle_epochs: dict[int, int] = {}  # the epoch of a node's latest idle heartbeat

    def take(self, message: Message) -> None:
        """Record a heartbeat.

        **Raises:** `ProtocolError` if the heartbeat is malformed.
        """
        figures = WorkerMetrics.read(message)
        if not message.body.get("busy"):
            self._idle_epochs[message.sender] = message.epoch
        if figures is not None:
            self._figures[message.sender] = figures
            self.peak_bytes = max(self.peak_bytes, figures.peak_bytes)

    def forget(self, node: int) -> None:
        """Remove the statistics of a lost node."""
        self._figures.pop(node, None)
        self._idle_epochs.pop(node, None)

    def figures(self, engines: Iterable[int]) -> dict[int, WorkerMetrics]:
        """Return the latest metrics of these engines."""
        return {engine: self._figures.get(engine, WorkerMetrics()) for engine in engines}

    def are_idle(self, nodes: Collection[int], epoch: int) -> bool:
        """Tell whether all these nodes have been idle in this epoch or a later one."""
        return all(self._idle_epochs.get(node, -1) >= epoch for node in nodes)


class ComputeTimer:
    """Divides the computing time that engines report over the steps.

    A heartbeat is up to a tenth of a second old. Computing time that the heartbeat does not include
    yet counts for the next step. So the sum over a run is right although the time of one step is
    not exact.
    """

    def __init__(self) -> None:
        self._before: dict[int, float] = {}
        self._carried = 0.0  # seconds that exceeded their step's length, carried over

    def of_step(self, metrics: Mapping[int, WorkerMetrics], seconds: float) -> float:
        """Return the computing time of the slowest engine of a step, in seconds.

        Args:
            metrics: the latest metrics of the step's engines.
            seconds: the length of the step.
        """
        new = [each.computed - self._before.get(engine, 0.0) for engine, each in metrics.items()]
        # Engines of earlier steps are kept: a spare engine may take part again later.
        self._before |= {engine: each.computed for engine, each in metrics.items()}
        computed = self._carried + max(new, default=0.0)
        self._carried = max(0.0, computed - seconds)
        return min(computed, seconds)


_LEAST_SECONDS = 1.0  # of computing; a comparison over less is noise
_REPORT_SECONDS = 600.0  # between reports of an engine whose slowdown has not changed much
_REPORT_CHANGE = 1.5  # of the slowdown factor; then an engine is reported at once


@dataclass(frozen=True)
class Straggler:
    """A slow engine: its slowdown factor, and the number of checks in a row that found it slow."""

    engine: int
    times: float
    looks: int


class StragglerDetector:
    """Compares engines' speeds from their computing time so far.

    Args:
        factor: an engine is slow if it takes more than this many times the median.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._before: dict[int, tuple[float, int]] = {}
        self._slow: dict[int, int] = {}

    def look(self, computed: Mapping[int, tuple[float, int]]) -> list[Straggler]:
        """Return the slow engines after a step.

        Args:
            computed: for every engine of the step, seconds and micro-batches so far.
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
            return []  # an engine has computed too briefly
        self._before = dict(computed)
        # The plain median of two engines would be halfway to the slow one.
        usual = statistics.median_low(pace.values())
        found = []
        for engine, own in pace.items():
            if own <= self._factor * usual:
                self._slow.pop(engine, None)
                continue
            self._slow[engine] = self._slow.get(engine, 0) + 1
            found.append(Straggler(engine, own / usual, self._slow[engine]))
        return found


class StragglerReports:
    """Decides which checks of slow engines are reported.

    An engine is reported again after ten minutes, or when its slowdown is 1.5 times as
    large or as small.

    **Arguments:** `clock` returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported: dict[int, tuple[float, float]] = {}  # time and factor, by engine

    def is_due(self, slow: Straggler) -> bool:
        """Return whether to report a slow engine now; this is then its last report."""
        now = self._clock()
        self._reported = {
            engine: (at, times)
            for engine, (at, times) in self._reported.items()
            if now < at + _REPORT_SECONDS
        }
        if slow.engine in self._reported:
            _, before = self._reported[slow.engine]
            if max(slow.times / before, before / slow.times) < _REPORT_CHANGE:
                return False
        self._reported[slow.engine] = now, slow.times
        return True
