"""How a step is decided: once, from what all shards report of its gradients.

A commit has two phases. In the first every shard reports (`prepare`), in the second every shard is
told the decision (`decide`). `CommitRule.decide` is the only place where a decision is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import StorageError
from penstock.store.holding import Holding
from penstock.store.interface import Commit, Decision, Store
from penstock.store.learning_rate_schedules import Schedule, learning_rate
from penstock.store.norm import GradientReport, clip_scale, global_norm, zero_gradients


@dataclass(frozen=True)
class CommitRule:
    """What decides a step beside its gradients.

    `schedule` gives the learning rate of every step, `clip_norm` is the greatest global norm of the
    gradients, None not to clip.
    """

    schedule: Schedule
    clip_norm: float | None = None

    def decide(self, holding: Holding, step: int, report: GradientReport) -> Commit:
        """Decide a step.

        Args:
            holding: all that is trained.
            step: the step that is to be committed; the first is 1.
            report: of all gradients (`merged`).

        Raises:
            NoTrainingError: a trainable weight has got no gradient.
            NonFiniteError: a gradient is NaN or infinite.
        """
        norm = global_norm(holding, step, report)
        scale, rate = clip_scale(norm, self.clip_norm), learning_rate(self.schedule, step - 1)
        return Commit(Decision(step, norm, scale, rate), zero_gradients(holding, report))


def commit_by(rule: CommitRule, store: Store) -> Commit:
    """Commit the step of a store that holds, or can ask for, all of its gradients.

    Raises:
        NoTrainingError: a trainable weight has got no gradient. Nothing is committed.
        NonFiniteError: a gradient is NaN or infinite. Nothing is committed.
    """
    commit = rule.decide(store.program, store.step + 1, store.prepare())
    store.decide(commit.decision)
    return commit


def require_next(decision: Decision, step: int) -> None:
    """Require that a decision is for the step after the one at which a store stands.

    **Raises:** `StorageError` if it is for another.
    """
    if decision.step != step + 1:
        raise StorageError(
            f"the store stands at step {step}, so step {step + 1} is next; a decision for step "
            f"{decision.step} came and changed nothing: open the run again, it goes on from the "
            "last step that all shards hold"
        )
