"""Where the time of a step goes: spans of time on lanes, by a clock that can be replaced.

A lane is what does one thing at a time: the engine that computes, the store that hands out weights.
Who does the work measures it:

    with spans.span("store", "fetch", step=7, op=3, bytes=4096):
        ...

The sum of a lane is always there, for the figures of a step; it costs two looks at the clock.
The spans themselves are kept only where somebody asks for so many of them, who takes them away
at the commit (`drain`): what is not drained is bounded, and counted when it is dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

Clock = Callable[[], float]
"""Returns seconds since some instant; never less than before."""


@dataclass(frozen=True)
class Span:
    """A piece of time in which a lane did one thing.

    Attributes:
        begin, end: in seconds of the clock.
        step: of the run, from 1; None beside the steps.
        op: the number of the operation within the step.
        bytes: that were moved.
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
    """What was measured between two drains: seconds by lane, and the spans that were kept.

    `dropped` spans were too many to keep; the seconds have them.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    dropped: int = 0


class Spans:
    """Measures spans; from any thread, each lane by one thread at a time.

    Args:
        clock: in place of the host's, for a simulated run.
        keep: how many spans to keep between two drains; with 0 there are only sums.
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
        """Measure the block of a `with` statement, also where it ends in an error."""
        return _Running(self, lane, what, step, op, bytes)

    def seconds(self, lane: str) -> float:
        """Return the sum of a lane's spans that have ended since the last drain."""
        return self._seconds.get(lane, 0.0)

    def drain(self) -> Measured:
        """Return what was measured since the last time, and begin anew.

        A span that is running counts where it ends.
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
