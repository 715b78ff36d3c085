"""What a step reports of its arithmetic and of its masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.planning import ExecutionPlan
from penstock.store import Decision


@dataclass(frozen=True)
class MaskFigures:
    """The operations of a step, and the state of the masks after its commit.

    `sparsity` is the share of absent entries in all sparse weights, None without any.
    `changed_entries` were dropped or grown by the commit.
    """

    flops: int
    sparsity: float | None = None
    changed_entries: int = 0

    @classmethod
    def of(cls, plan: ExecutionPlan, kept: Mapping[str, int], decision: Decision) -> MaskFigures:
        """Return the figures of a step.

        Args:
            plan: of the step.
            kept: entries of every sparse weight before the commit.
            decision: of the commit.
        """
        if plan.sparse is None:
            return cls(plan.flops.of({}))
        flops = plan.flops.of(kept, plan.sparse.policy.needs_dense_gradients(decision.step))
        after = {**kept, **{change.weight: change.kept_after for change in decision.masks}}
        changed = sum(change.drop.count + change.grow.count for change in decision.masks)
        sparsity = 1 - sum(after.values()) / sum(plan.sparse.elements.values())
        return cls(flops, sparsity, changed)
