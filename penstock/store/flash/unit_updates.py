"""The pending updates of units, block by block, in the order in which the blocks were read."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.store.flash.blocks import StateBlocks
from penstock.store.flash.changing_weight import ChangedWeight, ChangingWeight
from penstock.store.flash.layout import Block, Unit
from penstock.store.flash.spill import GradientSpill
from penstock.store.flash.version import Version, checksum
from penstock.store.masks import Masks

Update = Callable[[Unit, Block, np.ndarray, np.ndarray, np.ndarray | None], None]
"""Updates one block in place, given unit, block, frame, state, and gradient if it was on flash."""


@dataclass(frozen=True)
class UpdatedBlock:
    """What has become of a block.

    Attributes:
        checks: the checksums of the streams and of the states of the unit's blocks, after the last.
        is_gathered: whether its state was copied, because the mask changes: the buffer is free.
        changed: the whole weight, after the last block of one whose mask changes.
    """

    checks: list[list[bytes]] | None = None
    is_gathered: bool = False
    changed: ChangedWeight | None = None


class UnitUpdates:
    """Updates blocks and makes the pending changes of masks; used by one thread.

    Args:
        version: checks what was read.
        state: the present blocks of units.
        spill: the gradients on flash.
        update: computes the update of a block.
        masks: those of the sparse weights.
        await_memory: waits until no other weight has all its state in memory.
    """

    def __init__(
        self,
        version: Version,
        state: StateBlocks,
        spill: GradientSpill,
        update: Update,
        masks: Masks,
        await_memory: Callable[[], None],
    ) -> None:
        self._version, self._state, self._spill = version, state, spill
        self._apply, self._masks, self._await_memory = update, masks, await_memory
        self.compute = threading.Lock()  # kernels must not run concurrently
        self._checks: list[list[bytes]] = [[], []]
        self._changing: ChangingWeight | None = None

    def forget(self) -> None:
        """Forget the blocks of a unit that was not updated to its end."""
        self._checks = [[], []]

    def update(
        self,
        unit: Unit,
        block: Block,
        frame: np.ndarray,
        parts: tuple[np.ndarray, np.ndarray | None],
        is_checked: bool,
    ) -> UpdatedBlock:
        """Update the next block of a unit in place.

        Args:
            frame: the streamed values of the unit.
            parts: the state of the block, and its gradient if that was on flash.
            is_checked: whether the state has been compared with its checksum.
        """
        data, gradient = parts
        if not is_checked:
            self._version.check_state(unit, block, data)
        if gradient is not None:
            gradient = self._spill.checked(unit, block, gradient)
        blocks = self._state.blocks(unit)
        if block is blocks[0] and self._masks.is_changing(unit.names[0]):
            self._await_memory()
            self._changing = ChangingWeight(unit, blocks, self._masks)
        with self.compute:
            if self._changing is not None:
                self._changing.note(block, frame, data)
            self._apply(unit, block, frame, data, gradient)
        is_last = block is blocks[-1]
        if unit.is_sparse and is_last:
            self._masks.updated(unit.names[0])
        if self._changing is not None:
            return self._gather(self._changing, block, frame, data, is_last)
        width = unit.stream_width
        self._checks[0].append(checksum(frame[block.begin * width : block.end * width]))
        self._checks[1].append(checksum(data))
        if not is_last:
            return UpdatedBlock()
        checks, self._checks = self._checks, [[], []]
        return UpdatedBlock(checks)

    def _gather(
        self,
        changing: ChangingWeight,
        block: Block,
        frame: np.ndarray,
        data: np.ndarray,
        is_last: bool,
    ) -> UpdatedBlock:
        """Take an updated block of a weight whose mask changes; after the last, make the change."""
        changing.gather(block, data)
        if not is_last:
            return UpdatedBlock(is_gathered=True)
        with self.compute:
            changed = changing.finish(frame)
        self._changing = None
        return UpdatedBlock(changed.checks, True, changed)
