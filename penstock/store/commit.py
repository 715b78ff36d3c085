"""The decision of a step: made once, from the gradient reports of all shards.

A commit has two phases. In the first phase every shard reports (`prepare`). In the second phase
every shard receives the decision (`decide`). Only `CommitRule.decide` makes a decision.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from penstock.errors import StorageError
from penstock.store.holding import Holding
from penstock.store.interface import Commit, Decision, Store
from penstock.store.learning_rate_schedules import Schedule, learning_rate
from penstock.store.norm import GradientReport, clip_scale, global_norm, zero_gradients


@dataclass(frozen=True)
class CommitRule:
    """The settings that decide a step, besides the gradients.

    `schedule` gives the learning rate of every step. `clip_norm` is the greatest global norm of the
    gradients; None disables clipping.
    """

    schedule: Schedule
    clip_norm: float | None = None

    def decide(self, holding: Holding, step: int, report: GradientReport) -> Commit:
        """Decide a step.

        Args:
            holding: all trained weights.
            step: the step to commit; the first is 1.
            report: the report on all gradients (`merged`).

        Raises:
            NoTrainingError: a trainable weight received no gradient.
            NonFiniteError: a gradient is NaN or infinite.
        """
        norm = global_norm(holding, step, report, self.clip_norm)
        scale, rate = clip_scale(norm, self.clip_norm), learning_rate(self.schedule, step - 1)
        return Commit(Decision(step, norm, scale, rate), zero_gradients(holding, report))


def commit_by(
    rule: CommitRule, store: Store, decide_masks: Callable[[Decision], Decision] | None = None
) -> Commit:
    """Commit the step of a store that holds, or can query, all of its gradients.

    Args:
        rule: decides the step.
        store: its holder.
        decide_masks: adds the changes of masks to a decision, if the store has sparse weights.

    Raises:
        NoTrainingError: a trainable weight received no gradient. Nothing is committed.
        NonFiniteError: a gradient is NaN or infinite. Nothing is committed.
        ConfigError: a mask would keep no entry. Nothing is committed.
    """
    commit = rule.decide(store.program, store.step + 1, store.prepare())
    if decide_masks is not None:
        commit = replace(commit, decision=decide_masks(commit.decision))
    store.decide(commit.decision)
    return commit


def require_next(decision: Decision, step: int) -> None:
    """Check that a decision is for the store's next step.

    **Raises:** `StorageError` if it is for another step.
    """
    if decision.step != step + 1:
        raise StorageError(
            f"the store is at step {step}: expected a decision for step {step + 1}, got one for "
            f"step {decision.step}, which changed nothing. Open the run again: it continues from "
            "the last step that all shards hold"
        )
