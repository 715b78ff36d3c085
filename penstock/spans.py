"""The time of a step as spans on lanes, measured with a replaceable clock.

A lane does one thing at a time: the engine computes, the store returns weights. The code that does
the work measures it:

    with spans.span("store", "fetch", step=7, op=3, bytes=4096):
        ...

The sum of a lane is always kept, for the metrics of a step, at the cost of two clock readings. The
spans themselves are kept only on request, up to a number, and `drain` removes them at the commit.
Spans beyond the limit are dropped and counted. The nodes and the store of a process measure their
own spans; `distributed/control/span_collector.py` puts those of all processes on one clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

Clock = Callable[[], float]
"""Returns seconds since a fixed instant; never decreases."""


@dataclass(frozen=True)
class Span:
    """An interval in which a lane did one thing.

    Attributes:
        begin, end: in seconds of the clock.
        step: of the run, from 1; None outside the steps.
        op: the number of the operation within the step.
        bytes: the bytes that were transferred.
    """

    lane: str
    what: str
    begin: float
    end: float
    step: int | None = None
    op: int | None = None
    bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Measured:
    """The measurements between two drains: seconds by lane, and the kept spans.

    `dropped` is the number of spans beyond the limit; the seconds include them.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    dropped: int = 0


class Spans:
    """Measures spans from any thread; only one thread at a time may use a lane.

    Args:
        clock: replaces the host's clock, for a simulated run.
        keep: the number of spans to keep between two drains; with 0 only sums are kept.
    """

    def __init__(self, clock: Clock = time.perf_counter, keep: int = 0) -> None:
        if keep < 0:
            raise ValueError(f"keep: expected 0 or more spans, got {keep}")
        self.clock, self.keep = clock, keep
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}
        self._taken: dict[str, float] = {}  # the totals at the last `take_seconds` of each lane
        self._seconds: dict[str, float] = {}  # since the last drain
        self._spans: list[Span] = []
        self._dropped = 0

    def span(
        self,
        lane: str,
        what: str,
        *,
        step: int | None = None,
        op: int | None = None,
        bytes: int = 0,
    ) -> RunningSpan:
        """Measure the block of a `with` statement, even if it ends with an error."""
        return RunningSpan(self, lane, what, step, op, bytes)

    def seconds(self, lane: str) -> float:
        """Return the sum of all spans of a lane that have ended."""
        return self._totals.get(lane, 0.0)

    def take_seconds(self, lane: str) -> float:
        """Return the sum of a lane's spans that have ended since the last call for this lane;
        independent of `drain`."""
        with self._lock:
            total = self._totals.get(lane, 0.0)
            taken, self._taken[lane] = total - self._taken.get(lane, 0.0), total
        return taken

    def drain(self) -> Measured:
        """Return the measurements since the last drain, and reset them.

        A running span counts in the drain after its end.
        """
        with self._lock:
            found = Measured(self._seconds, tuple(self._spans), self._dropped)
            self._seconds, self._spans, self._dropped = {}, [], 0
        return found

    def _add(self, running: RunningSpan, end: float) -> None:
        lane, seconds = running.lane, end - running.begin
        with self._lock:
            for sums in (self._totals, self._seconds):
                sums[lane] = sums.get(lane, 0.0) + seconds
            if len(self._spans) < self.keep:
                self._spans.append(
                    Span(
                        lane,
                        running.what,
                        running.begin,
                        end,
                        running.step,
                        running.op,
                        running.bytes,
                    )
                )
            elif self.keep:
                self._dropped += 1


class RunningSpan:
    """A span that has not ended; a context manager."""

    __slots__ = ("_spans", "begin", "bytes", "lane", "op", "step", "what")

    def __init__(
        self, spans: Spans, lane: str, what: str, step: int | None, op: int | None, bytes: int
    ) -> None:
        self._spans = spans
        self.lane, self.what, self.step, self.op, self.bytes = lane, what, step, op, bytes

    def __enter__(self) -> None:
        self.begin = self._spans.clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spans._add(self, self._spans.clock())


def gather(own: Spans, parts: Iterable[Spans]) -> Measured:
    """Return what was measured since the last call, with the spans of other parts of a process.

    Args:
        own: has the seconds to return, and the number of spans that every part keeps from now on.
        parts: measured by the same clock as `own`. Parts that measure the host's work use its clock
            (`time.perf_counter`), so in a simulation only `own` is in simulated time.
    """
    found = [own.drain()]
    for each in parts:
        each.keep = own.keep
        found.append(each.drain())
    spans = tuple(span for each in found for span in each.spans)
    return Measured(found[0].seconds, spans, sum(each.dropped for each in found))
