"""Values that views derive from events: recent speeds, time left, epochs, the losses so far.

The training thread records events while the thread of a view draws. Progress is therefore
immutable: an event gives a new `Progress`, and a view replaces its reference. No lock is needed,
and a terminal that blocks the drawing thread does not delay a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from penstock.telemetry import (
    FIRST_STEPS,
    ClusterEvent,
    Compiling,
    Evaluated,
    Evaluating,
    Event,
    Notice,
    RunStarted,
    Saved,
    StepDone,
)

# Speeds are means over this many steps: steady enough to read, and quick to show a change.
_RECENT_STEPS = 20
# A chart is less than a hundred characters wide, and a run may have millions of steps.
_MOST_POINTS = 1024
# Events that may come during an evaluation.
_WITHIN_EVALUATION = (Compiling, Evaluating, Notice, Saved, ClusterEvent)


@dataclass(frozen=True)
class LossHistory:
    """Losses of all steps in bounded memory: `means` over equal numbers of steps, oldest first.

    The last `pending_steps` steps, with losses of `pending_sum` in total, are no point yet.
    """

    means: tuple[float, ...] = ()
    steps_per_point: int = 1
    pending_sum: float = 0.0
    pending_steps: int = 0

    def after(self, loss: float) -> LossHistory:
        """Return the history with the loss of the next step."""
        total, steps = self.pending_sum + loss, self.pending_steps + 1
        if steps < self.steps_per_point:
            return replace(self, pending_sum=total, pending_steps=steps)
        means, steps_per_point = (*self.means, total / steps), self.steps_per_point
        if len(means) == _MOST_POINTS:
            means = tuple(_mean(means[i : i + 2]) for i in range(0, _MOST_POINTS, 2))
            steps_per_point *= 2
        return LossHistory(means, steps_per_point)


@dataclass(frozen=True)
class Progress:
    """The progress of a run after its last event; `clock` returns seconds.

    `mask_change` is the last step that changed masks. `best_loss` is the best held-out loss of the
    whole run, also before a resume, and `best_step` its step; None if unknown. `steps` counts the
    steps since the run, or this part of a resumed run, began at `began`. `evaluating` is the
    batch of an evaluation that has not ended, `is_compiling` whether kernels have been compiled
    since the last step or evaluation.
    """

    clock: Callable[[], float] = time.monotonic
    started: RunStarted | None = None
    began: float = 0.0
    last: StepDone | None = None
    mask_change: StepDone | None = None
    evaluated: Evaluated | None = None
    best_loss: float | None = None
    best_step: int | None = None
    saved: Saved | None = None
    losses: LossHistory = field(default_factory=LossHistory)
    recent: tuple[StepDone, ...] = ()
    steps: int = 0
    evaluating: Evaluating | None = None
    is_compiling: bool = False

    def after(self, event: Event) -> Progress:
        """Return the progress after another event."""
        if isinstance(event, Compiling):
            return replace(self, is_compiling=True)
        if self.is_compiling and isinstance(event, (StepDone, Evaluating, Evaluated)):
            return replace(self, is_compiling=False).after(event)
        if isinstance(event, Evaluating):
            return replace(self, evaluating=event)
        if self.evaluating is not None and not isinstance(event, _WITHIN_EVALUATION):
            return replace(self, evaluating=None).after(event)
        if isinstance(event, RunStarted):
            return Progress(
                self.clock,
                started=event,
                began=self.clock(),
                evaluated=self.evaluated,
                best_loss=event.best_loss,
                best_step=event.best_step,
                saved=self.saved,
                is_compiling=self.is_compiling,
            )
        if isinstance(event, StepDone):
            recent = () if self.steps <= FIRST_STEPS else self.recent
            return replace(
                self,
                last=event,
                mask_change=event if event.changed_entries else self.mask_change,
                losses=self.losses.after(event.loss),
                recent=(*recent, event)[-_RECENT_STEPS:],
                steps=self.steps + 1,
            )
        if isinstance(event, Evaluated) and event.best:
            return replace(self, evaluated=event, best_loss=event.loss, best_step=event.step)
        if isinstance(event, Evaluated):
            return replace(self, evaluated=event)
        if isinstance(event, Saved):
            return replace(self, saved=event)
        return self

    @property
    def loss_unit(self) -> str:
        """The unit of the training loss; empty if it is unknown."""
        return self.started.loss_unit if self.started else ""

    @property
    def seconds_per_step(self) -> float:
        """Mean over recent steps, without the first one or two as soon as there are others."""
        return sum(s.seconds for s in self.recent) / max(len(self.recent), 1)

    @property
    def tokens_per_second(self) -> float:
        """Mean over recent steps; counts rows for a model without tokens."""
        return self._per_second(sum(s.tokens for s in self.recent))

    @property
    def streamed_per_second(self) -> float:
        """Bytes of weights per second, over recent steps."""
        return self._per_second(sum(s.streamed_bytes for s in self.recent))

    @property
    def seconds_elapsed(self) -> float:
        """Seconds since this run, or this part of a resumed run, began."""
        return self.clock() - self.began

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds of the remaining steps; None after the first and the last step."""
        if self.started is None or self.last is None or self.steps < FIRST_STEPS:
            return None
        steps = self.started.steps - self.last.step
        return steps * self.seconds_per_step if steps else None

    @property
    def is_left_rough(self) -> bool:
        """Whether `seconds_left` is a rough estimate, by one step that may compile."""
        return self.steps == FIRST_STEPS

    @property
    def epochs(self) -> float | None:
        """The number of passes over the training data; None if its size is unknown."""
        if self.started is None or self.started.steps_per_epoch is None:
            return None
        step = self.last.step if self.last else self.started.resumed_from or 0
        return step / self.started.steps_per_epoch

    def _per_second(self, amount: float) -> float:
        return amount / max(sum(s.seconds for s in self.recent), 1e-9)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
