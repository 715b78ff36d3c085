"""Values that views derive from events: recent speeds, time left, epochs, the losses so far."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from penstock.telemetry import Evaluated, Event, RunStarted, Saved, StepDone

# Speeds are means over this many steps: steady enough to read, and quick to show a change.
_RECENT_STEPS = 20
# The first two steps compile kernels (the second those of the updates), so they take longest.
_FIRST_STEPS = 2
# A chart is less than a hundred characters wide, and a run may have millions of steps.
_MOST_POINTS = 1024


class LossHistory:
    """Losses of all steps in bounded memory: `means` over equal numbers of steps, oldest first."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self._steps_per_point = 1
        self._pending: list[float] = []  # of the unfinished point

    def add(self, loss: float) -> None:
        """Add the loss of the next step."""
        self._pending.append(loss)
        if len(self._pending) < self._steps_per_point:
            return
        self.means.append(_mean(self._pending))
        self._pending.clear()
        if len(self.means) == _MOST_POINTS:
            self.means = [_mean(self.means[i : i + 2]) for i in range(0, _MOST_POINTS, 2)]
            self._steps_per_point *= 2


class Progress:
    """The progress of a run. **Arguments:** `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.started: RunStarted | None = None
        self.last: StepDone | None = None
        self.mask_change: StepDone | None = None  # the last step that changed masks
        self.evaluated: Evaluated | None = None
        self.best: Evaluated | None = None
        self.saved: Saved | None = None
        self.losses = LossHistory()
        self._steps = 0  # since the run, or this part of a resumed run, began
        self._clock = clock
        self._began = clock()
        self._recent: deque[StepDone] = deque(maxlen=_RECENT_STEPS)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.started, self._began = event, self._clock()
            self.last, self.losses, self._steps = None, LossHistory(), 0
            self.mask_change = None
            self._recent.clear()
        elif isinstance(event, StepDone):
            self.last = event
            self.mask_change = event if event.changed_entries else self.mask_change
            self.losses.add(event.loss)
            self._steps += 1
            if self._steps == _FIRST_STEPS + 1:
                self._recent.clear()
            self._recent.append(event)
        elif isinstance(event, Evaluated):
            self.evaluated = event
            self.best = event if event.best else self.best
        elif isinstance(event, Saved):
            self.saved = event

    @property
    def loss_unit(self) -> str:
        """The unit of the training loss; empty if it is unknown."""
        return self.started.loss_unit if self.started else ""

    @property
    def seconds_per_step(self) -> float:
        """Mean over recent steps, without the first two as soon as there are others."""
        return sum(s.seconds for s in self._recent) / max(len(self._recent), 1)

    @property
    def tokens_per_second(self) -> float:
        """Mean over recent steps; counts rows for a model without tokens."""
        return self._per_second(sum(s.tokens for s in self._recent))

    @property
    def streamed_per_second(self) -> float:
        """Bytes of weights per second, over recent steps."""
        return self._per_second(sum(s.streamed_bytes for s in self._recent))

    @property
    def seconds_elapsed(self) -> float:
        """Seconds since this run, or this part of a resumed run, began."""
        return self._clock() - self._began

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds of the remaining steps; None in the first two steps and at the end."""
        if self.started is None or self.last is None or self._steps <= _FIRST_STEPS:
            return None
        steps = self.started.steps - self.last.step
        return steps * self.seconds_per_step if steps else None

    @property
    def epochs(self) -> float | None:
        """The number of passes over the training data; None if its size is unknown."""
        if self.started is None or self.started.steps_per_epoch is None:
            return None
        step = self.last.step if self.last else self.started.resumed_from or 0
        return step / self.started.steps_per_epoch

    def _per_second(self, amount: float) -> float:
        return amount / max(sum(s.seconds for s in self._recent), 1e-9)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
