"""The best held-out loss of a run, and early stopping without improvement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from penstock.config import Config
from penstock.data import Source
from penstock.errors import ConfigError
from penstock.training.resume_state import ResumeState


@dataclass
class EarlyStop:
    """Judges the evaluations of a run, each step once.

    `judged_step` is the newest step that was judged.

    `patience` is the number of evaluations in a row that may bring no better loss, None for no
    limit. `best_step` is the step of `best_loss`, None if an older version has recorded the loss.
    `forgotten` tells the user why the best loss of a resumed run is not compared any more.
    """

    patience: int | None
    best_loss: float | None = None
    evaluations_since_best: int = 0
    judged_step: int = 0
    best_step: int | None = None
    forgotten: str | None = None

    @classmethod
    def of_run(cls, config: Config, recorded: ResumeState | None, step: int) -> EarlyStop:
        """Return the state of a run at `step`, which continues from what it recorded.

        The best loss is forgotten if it was measured on another number of batches.
        """
        patience, batches = config.evaluation.early_stop_patience, config.evaluation.batches
        if recorded is None:
            return cls(patience)
        loss, since_best = recorded.best_loss, recorded.evaluations_since_best
        judged = step if recorded.evaluated_step is None else recorded.evaluated_step
        if loss is None or not math.isfinite(loss):
            return cls(patience, None, since_best, judged)
        if recorded.best_batches not in (None, batches):
            at = "" if recorded.best_step is None else f" at step {recorded.best_step}"
            return cls(
                patience,
                judged_step=judged,
                forgotten=f"evaluation.batches: the best held-out loss so far, {loss:g}{at}, was "
                f"measured on {recorded.best_batches} batches, and this run evaluates on "
                f"{batches}; losses on different rows are not compared, so the next "
                "evaluation starts with a new best loss",
            )
        return cls(patience, loss, since_best, judged, recorded.best_step)

    def to_record(self, batches: int) -> dict[str, Any]:
        """Return the fields of `ResumeState` that `of_run` reads.

        **Arguments:** `batches` is the number that each evaluation reads.
        """
        return {
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "best_batches": None if self.best_loss is None else batches,
            "evaluated_step": self.judged_step,
            "evaluations_since_best": self.evaluations_since_best,
        }

    def judge(self, step: int, loss: float, *, is_counted: bool = True) -> bool:
        """Record the loss after a step, and return whether it is the best so far.

        With `is_counted`, an evaluation without a better loss counts towards `patience`. That after
        the last step does not: a run that is continued would stop before an uninterrupted one.

        A loss that is not finite is never the best. A step that is repeated after a rollback has
        the same loss and changes nothing.
        """
        if step <= self.judged_step:
            return step == self.best_step
        self.judged_step = step
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.best_step, self.evaluations_since_best = loss, step, 0
            return True
        self.evaluations_since_best += is_counted
        return False

    @property
    def is_due(self) -> bool:
        """Whether the loss has not improved for `patience` evaluations."""
        return self.patience is not None and self.evaluations_since_best >= self.patience


def evaluation_due(config: Config, step: int) -> Literal["scheduled", "last"] | None:
    """Return why a run is evaluated after a step: the interval, or the end of the run."""
    every = config.evaluation.every
    if every is None or step == 0:
        return None
    if step % every == 0:
        return "scheduled"
    return "last" if step == config.run.steps else None


def unfinished(step: int) -> str:
    """Return the notice of an evaluation that a stop has interrupted."""
    return (
        f"the evaluation after step {step} did not finish; the next start repeats it, unless "
        "evaluation.every changes"
    )


def require_held_out(config: Config, held_out: Source | None) -> None:
    """Refuse early stopping in a run without evaluations.

    **Raises:** `ConfigError` if `evaluation.early_stop_patience` would have no effect.
    """
    if config.evaluation.early_stop_patience is not None and held_out is None:
        raise ConfigError(
            "evaluation.early_stop_patience: has no effect without held-out data; remove it, build "
            "the data set with data.validation above 0, or give Trainer(held_out=...)"
        )
