"""The masks of one shard: parts of masks, on which the shards of a store decide together.

A shard counts its entries in histograms, and applies the selections that the merged histograms of
all shards decide. Of a dense gradient it keeps the entries that may be grown: the largest absent
ones of its part, as many as the whole weight grows. The others cannot be among the largest of the
whole weight, so the dense gradient is not held.
"""

from dataclasses import replace

import numpy as np

from penstock.errors import NonFiniteError, StorageError
from penstock.sparsity import (
    Histogram,
    MaskChange,
    MaskSize,
    Order,
    PackedIndex,
    Remap,
    Selection,
    absent_histogram,
    apply_change,
    grown_entries,
    index_of_positions,
    kept_histogram,
    select_absent,
    selection_key,
)
from penstock.store.holding import HeldPart, Holding
from penstock.store.interface import Decision
from penstock.store.mask_plan import EMPTY_HISTOGRAM, OpenSelection
from penstock.store.mask_rule import MaskRule
from penstock.store.masks import Growth, Masks, Values


class PartMasks(Masks):
    """The masks of one shard; empty if it holds no sparse weight. Arguments are those of
    `Masks`."""

    def __init__(self, holding: HeldPart, rule: MaskRule | None) -> None:
        self._capacities = holding.capacities
        super().__init__(holding, rule)

    def _forget_plans(self) -> None:
        super()._forget_plans()
        self._candidates: dict[str, tuple[PackedIndex, np.ndarray]] = {}

    @property
    def sizes(self) -> dict[str, MaskSize]:
        """The sizes of all parts; pending changes are not counted yet."""
        return {n: MaskSize(w.elements, self.kept(n)) for n, w in self._specs.items()}

    # --- one step ---------------------------------------------------------------------------------

    def grow(self, name: str, dense_gradient: np.ndarray) -> None:
        """Keep the entries that the next step may grow; the dense gradient may then be freed.

        **Arguments:** `dense_gradient` is float32 `[elements]`, and finite.
        """
        assert self._rule is not None
        index = self._indices[name]
        most = int(self._rule.policy.grown_by_gradient * self._capacities[name])
        key = selection_key(self._rule.seed, name, self.step + 1, "grow")  # as in policies.py
        first = select_absent(Order.LARGEST, key, min(most, index.absent), index, dense_gradient)
        entries = grown_entries(name, first, index, dense_gradient)
        self._candidates[name] = entries, dense_gradient[entries.positions() - index.begin]

    def histogram(self, opened: OpenSelection, values: Values) -> Histogram:
        """Return the histogram of this shard's entries; empty if it holds none of the weight.

        **Arguments:** `values` are the masters of the last commit.

        Raises:
            NonFiniteError: the value of an entry is NaN or infinite.
        """
        name, selection = opened.weight, opened.selection
        if name not in self._specs:
            return EMPTY_HISTOGRAM
        index = self._indices[name]
        try:
            if opened.side == "drop":
                return kept_histogram(selection, index, values(name))
            if selection.order is Order.RANDOM:
                return absent_histogram(selection, index, None)
            if name not in self._candidates:
                return EMPTY_HISTOGRAM
            return kept_histogram(selection, *self._candidates[name])
        except NonFiniteError as error:
            raise NonFiniteError(f"mask of {name}: {error}") from error

    def settle(self, name: str, grow: Selection) -> None:
        """Keep, of the entries that may be grown, those that are selected over all shards."""
        if name not in self._candidates:
            return
        candidates, magnitudes = self._candidates.pop(name)
        kept = candidates
        if candidates.kept:
            nothing = replace(grow, count=0)
            # `apply_change` orders entries as the selection does: what it drops is selected.
            change = MaskChange(name, max(candidates.kept, grow.count) + 1, grow, nothing)
            rest = apply_change(change, candidates, magnitudes)
            is_selected = np.ones(candidates.kept, np.bool_)
            is_selected[rest.source] = False
            positions = candidates.positions()[is_selected]
            kept = index_of_positions(positions, candidates.elements, candidates.begin)
        self._arrived[name] = Growth(grow, kept)

    def discard(self) -> None:
        """Forget what was selected since the last commit."""
        super().discard()
        self._candidates.clear()

    def decide(self, decision: Decision, values: Values) -> Decision:
        """A shard does not decide alone."""
        raise RuntimeError("the shards of a store decide together; commit the whole store")

    def accept(self, decision: Decision) -> None:
        """Make the changes of a decision pending, as far as they concern this shard.

        Raises:
            StorageError: the dense gradient of a weight that they grow has not arrived; nothing
                has changed.
        """
        here = {change.weight: change for change in decision.masks if change.weight in self._specs}
        for name, change in here.items():
            by_gradient = change.grow.count and change.grow.order is Order.LARGEST
            if by_gradient and name not in self._candidates and name not in self._arrived:
                raise StorageError(
                    f"step {decision.step}: the decision grows {name} by its dense gradient, of "
                    "which this shard has received nothing; it changed nothing. Open the run "
                    "again: it continues from its last checkpoint"
                )
        for name, change in here.items():
            self.settle(name, change.grow)
        self._pending = here
        self._decided, self._arrived = self._arrived, {}
        self._candidates.clear()
        self.step = decision.step
        if not decision.replaces_update:
            self.updates += 1

    def remap(self, name: str, values: Values) -> Remap | None:
        """Return what the pending change of a mask does to its entries here; None if there is
        none."""
        change = self._pending.get(name)
        if change is None:
            return None
        magnitudes = values(name) if change.drop.count else None
        growth = self._decided.get(name)
        grown = growth.entries if growth is not None else None
        return apply_change(change, self._indices[name], magnitudes, grown=grown)

    # --- reading and restoring --------------------------------------------------------------------

    def start(self, name: str, values: np.ndarray) -> PackedIndex:
        """A shard does not choose its part of the first mask."""
        raise RuntimeError("the first masks are those of whole weights; load the whole store")

    def _require_room(self, name: str, index: PackedIndex) -> None:
        """A part needs no check: its memory is allocated anew when its mask grows."""


def masks_of(holding: Holding, rule: MaskRule | None) -> Masks:
    """Return the masks of a store that holds all weights, or of a shard."""
    if isinstance(holding, HeldPart):
        return PartMasks(holding, rule)
    return Masks(holding, rule)
