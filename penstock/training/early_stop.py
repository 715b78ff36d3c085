"""The best held-out loss of a run, and early stopping without improvement."""

from dataclasses import dataclass


@dataclass
class EarlyStop:
    """Judges the evaluations of a run, each step once.

    `patience` is the number of evaluations in a row that may bring no better loss, None for no
    limit.
    """

    patience: int | None
    best_loss: float | None = None
    evaluations_since_best: int = 0
    judged_step: int = -1

    def judge(self, step: int, loss: float) -> bool:
        """Record the loss after a step, and return whether it is the best so far."""
        self.judged_step = step
        if self.best_loss is None or loss < self.best_loss:
            self.best_loss, self.evaluations_since_best = loss, 0
            return True
        self.evaluations_since_best += 1
        return False

    @property
    def is_due(self) -> bool:
        """Whether the loss has not improved for `patience` evaluations."""
        return self.patience is not None and self.evaluations_since_best >= self.patience
