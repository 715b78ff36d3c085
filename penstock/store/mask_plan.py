"""What a step does with the masks of whole weights, and the rounds that select the entries.

A policy names numbers of entries. A radix selection decides which entries these are
(`sparsity/radix_selection.py`), in rounds over the histograms of all shards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from penstock.errors import StorageError
from penstock.program import WeightSpec
from penstock.sparsity import (
    Histogram,
    MaskChange,
    MaskSize,
    MaskUpdate,
    Selection,
    merged_histogram,
    narrowed,
)
from penstock.store.interface import Decision
from penstock.store.mask_rule import MaskRule

MOST_OPEN = 16
"""Selections that one round narrows: a limit on the memory and the messages of a round."""

Side = Literal["drop", "grow"]


@dataclass(frozen=True)
class OpenSelection:
    """A selection that is not decided yet: of a weight's entries to drop, or to grow."""

    weight: str
    side: Side
    selection: Selection


class SelectionRounds:
    """The rounds that select the entries to drop and to grow in one step.

    Args:
        update: what the policy does in the step.
        seed: seed of the run.
        kept: numbers of entries before the step, by weight.
        settled: selections of entries to grow that were decided before, by weight.
    """

    def __init__(
        self,
        update: MaskUpdate,
        seed: int,
        kept: Mapping[str, int],
        settled: Mapping[str, Selection],
    ) -> None:
        self._update, self._kept = update, kept
        self._selections: dict[tuple[str, Side], Selection] = {}
        for change in update.changes:
            drop, grow = update.selections(seed, change)
            self._selections[change.weight, "drop"] = drop
            self._selections[change.weight, "grow"] = settled.get(change.weight, grow)

    @property
    def open_selections(self) -> tuple[OpenSelection, ...]:
        """The selections that the next round narrows; none once all are decided."""
        undecided = ((k, s) for k, s in self._selections.items() if not s.is_decided)
        return tuple(OpenSelection(*key, one) for key, one in list(undecided)[:MOST_OPEN])

    def narrow(self, histograms: Sequence[Sequence[Histogram]]) -> None:
        """Finish a round by the histograms of every shard, each in the order of `open_selections`.

        **Raises:** `ValueError` if the shards have fewer entries than a selection needs.
        """
        of_shards = zip(*histograms, strict=True)
        for one, each in zip(self.open_selections, of_shards, strict=True):
            merged = merged_histogram(each)
            self._selections[one.weight, one.side] = narrowed(one.selection, merged)

    def decided(self, decision: Decision) -> Decision:
        """Return a decision with the changes of masks that the rounds have decided.

        **Raises:** `ConfigError` if a mask would keep no entry.
        """
        changes = tuple(
            MaskChange(
                change.weight,
                self._kept[change.weight],
                self._selections[change.weight, "drop"],
                self._selections[change.weight, "grow"],
            )
            for change in self._update.changes
        )
        replaces = self._update.replaces_update
        return replace(decision, masks=changes, replaces_update=replaces)


class MaskPlan:
    """The numbers of entries of whole sparse weights, and what a policy does with them.

    Args:
        specs: the sparse weights.
        trained: those of them whose masks may change.
        rule: decides the masks; None if the store does not train.
    """

    def __init__(
        self, specs: Mapping[str, WeightSpec], trained: Sequence[str], rule: MaskRule | None
    ) -> None:
        self._specs, self._trained, self._rule = specs, tuple(trained), rule
        self.kept = dict.fromkeys(specs, 0)  # after the last commit
        self.begin()

    def begin(self) -> None:
        """Forget what was planned: the numbers of entries are set anew."""
        self._update: tuple[int, MaskUpdate | None] = (0, None)

    @property
    def sizes(self) -> dict[str, MaskSize]:
        """The sizes of all masks after the last commit."""
        return {n: MaskSize(w.elements, self.kept[n]) for n, w in self._specs.items()}

    @property
    def seed(self) -> int:
        """The seed of the run."""
        assert self._rule is not None
        return self._rule.seed

    def needs_dense_gradient(self, name: str, step: int) -> bool:
        """Return whether a step needs the gradients of a weight's absent entries too."""
        if self._rule is None or name not in self._trained:
            return False
        return self._rule.policy.needs_dense_gradients(step)

    def may_change(self, step: int) -> bool:
        """Return whether a step may change masks, of this store or of another shard."""
        return self._rule is not None and self._rule.policy.may_change(step)

    def update_at(self, step: int) -> MaskUpdate | None:
        """Return what the policy does at the commit of the next step, which depends on the sizes of
        masks alone."""
        if self._rule is None or not self._trained:
            return None
        if self._update[0] != step:
            sizes = self.sizes
            trained = {name: sizes[name] for name in self._trained}
            self._update = step, self._rule.policy.at(step, trained)
        return self._update[1]

    def selection_rounds(
        self, step: int, settled: Mapping[str, Selection]
    ) -> SelectionRounds | None:
        """Return the rounds that decide the masks of a step; None if it changes no mask."""
        update = self.update_at(step)
        return None if update is None else SelectionRounds(update, self.seed, self.kept, settled)

    def require(self, decision: Decision) -> None:
        """Check that the changes of a decision are those that the policy makes of its step.

        **Raises:** `StorageError` if they are others.
        """
        update = self.update_at(decision.step)
        wanted = {c.weight: (c.drop, c.grow) for c in update.changes} if update else {}
        got = {c.weight: (c.drop.count, c.grow.count) for c in decision.masks}
        replaces = update is not None and update.replaces_update
        if wanted != got or replaces != decision.replaces_update:
            raise StorageError(
                f"step {decision.step}: expected a decision that changes the masks of "
                f"{len(wanted)} weights, got one for {len(got)}, or with other numbers of entries; "
                "it changed nothing. Open the run again: it continues from its last checkpoint"
            )

    def accept(self, decision: Decision) -> None:
        """Follow the numbers of entries through a decision that was checked."""
        for change in decision.masks:
            self.kept[change.weight] = change.kept_after


EMPTY_HISTOGRAM = Histogram(np.empty(0, np.uint16), np.empty(0, np.int64))
"""The histogram of a shard without entries of the weight."""
