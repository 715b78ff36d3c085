"""The time of a step as spans on lanes, measured with a replaceable clock.

A lane does one thing at a time: the engine computes, the store returns weights. The code that does
the work measures it:

    with spans.span("store", "fetch", step=7, op=3, bytes=4096):
        ...

The sum of a lane is always kept, for the metrics of a step, at the cost of two clock readings. The
spans themselves are kept only on request, up to a number, and `drain` removes them at the commit.
Spans beyond the limit are dropped and counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
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
        self.clock = clock
        self._keep = keep
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}
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
    ) -> _Running:
        """Measure the block of a `with` statement, even if it ends with an error."""
        return _Running(self, lane, what, step, op, bytes)

    def seconds(self, lane: str) -> float:
        """Return the sum of a lane's spans that have ended since the last drain."""
        return self._seconds.get(lane, 0.0)

    def drain(self) -> Measured:
        """Return the measurements since the last drain, and reset them.

        A running span counts in the drain after its end.
        """
        with self._lock:
            found = Measured(self._seconds, tuple(self._spans), self._dropped)
            self._seconds, self._spans, self._dropped = {}, [], 0
        return found

    def _add(self, running: _Running, end: float) -> None:
        lane = running.lane
        with self._lock:
            self._seconds[lane] = self._seconds.get(lane, 0.0) + end - running.begin
            if len(self._spans) < self._keep:
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
            elif self._keep:
                self._dropped += 1


class _Running:
    """A span that has not ended."""

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
