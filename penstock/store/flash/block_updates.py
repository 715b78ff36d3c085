"""Applies the last commit's update to one block that was read from flash."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from penstock.kernels.blocks import GRANULE
from penstock.kernels.packed_entries import PackedEntries
from penstock.store.flash.layout import Block, Unit
from penstock.store.flash.version import state_roles, state_slices, weight_parts
from penstock.store.gradients import Gradients
from penstock.store.holding import Holding
from penstock.store.interface import Decision
from penstock.store.masks import Masks
from penstock.store.optimizers import GroupSettings, Optimizer, rounding_key
from penstock.store.roles import AGE
from penstock.store.unchanged_weights import UnchangedWeights


class BlockUpdates:
    """Applies the updates of the last decision, block by block; called by the updater thread.

    Args:
        program: names the weights.
        optimizer: computes the updates.
        groups: settings of every trainable weight, by name.
        gradients: the gradients that are in memory.
        unchanged: records which weights an update has changed.
        masks: those of the sparse weights.
    """

    def __init__(
        self,
        program: Holding,
        optimizer: Optimizer,
        groups: Mapping[str, GroupSettings],
        gradients: Gradients,
        unchanged: UnchangedWeights,
        masks: Masks,
    ) -> None:
        self._program, self._optimizer, self._groups = program, optimizer, groups
        self._gradients, self._unchanged, self._masks = gradients, unchanged, masks
        self._pending: tuple[Decision, int] | None = None  # and the number of the update

    def decided(self, decision: Decision) -> None:
        """Take the decision of a step, which the masks have accepted."""
        self._pending = decision, self._masks.updates

    def expect(self, decision: Decision) -> None:
        """Take the decision that is expected of the next step; only after all updates."""
        self._pending = decision, self._masks.updates + 1
        self._unchanged.mark()

    def dropped(self) -> None:
        """Forget the updates since `expect`."""
        self._unchanged.go_back()

    def apply(
        self,
        unit: Unit,
        block: Block,
        frame: np.ndarray,
        data: np.ndarray,
        spilled: np.ndarray | None,
    ) -> None:
        """Update a block in place, unless the decision replaces the update.

        Args:
            frame: the streamed values of the block.
            data: the state of the block.
            spilled: the gradients of the block, if they are on flash.
        """
        assert self._pending is not None
        decision, number = self._pending
        if decision.replaces_update:
            return
        parts, state = weight_parts(unit, block, frame, data), state_roles(unit, block, data)
        for name, begin, end, first in unit.pieces(block):
            here, there = slice(begin - block.begin, end - block.begin), slice(begin, end)
            weight = (parts[0][there], *(part[here] for part in parts[1:]))
            settings = self._groups[name]
            rate = decision.learning_rate * settings.learning_rate_scale
            if spilled is None:
                gradient = self._gradients.array(name)[first : first + end - begin]
            else:
                gradient = spilled[here]
            position, packed = first, None
            if block.granules is not None:
                position, packed = block.granules.first * GRANULE, self._entries(name, block, state)
            with self._unchanged.watching(name, weight, rate):
                self._optimizer.update(
                    weight,
                    gradient,
                    state if unit.is_sparse else state_slices(unit, state, here),
                    step=number,
                    learning_rate=rate,
                    weight_decay=settings.weight_decay,
                    gradient_scale=decision.clip_scale,
                    key=rounding_key(name),
                    position=self._program.weights[name].begin + position,
                    packed=packed,
                )

    def _entries(self, name: str, block: Block, state: Mapping[str, np.ndarray]) -> PackedEntries:
        """Return what the optimizer needs to know of the entries of a block."""
        assert block.granules is not None
        entries = self._masks.entries(name, state.get(AGE))
        return dataclasses.replace(entries, offsets=block.granules.offsets)
