"""Which blocks of optimizer state are in memory: some permanently, a few others in transit.

Blocks in transit are read ahead of the next update pass, always the first blocks that are not in
memory. The pass takes blocks in the same order, so it never waits for a later block.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.kernels.memory import allocate
from penstock.store.flash.layout import Block, FlashLayout, Unit


class StateBlocks:
    """Memory for blocks of state. Not thread-safe: the owner calls it under a lock.

    Args:
        layout: the units.
        blocks: the blocks of each unit; those of a sparse weight change with its mask.
        held_bytes: memory for blocks that stay in memory between steps. These are the first blocks
            of the layout, which the forward sweep needs first. Those of a sparse weight stay all or
            none. If it is zero, no block stays in memory, whatever its size: gradients may then be
            on flash.
        buffers: number of buffers for the other blocks.
        buffer_bytes: bytes of a buffer, which also has space for a gradient from flash.
    """

    def __init__(
        self,
        layout: FlashLayout,
        blocks: Sequence[Sequence[Block]],
        held_bytes: int,
        buffers: int,
        buffer_bytes: int,
    ) -> None:
        self._spare = deque(allocate(buffer_bytes) for _ in range(buffers))
        self._buffers = buffers
        self._held: dict[tuple[int, int], np.ndarray] = {}
        self._resident: set[tuple[int, int]] = set()
        self._whole: set[int] = set()
        self._trained = [unit for unit in layout.units if unit.trainable]
        self._blocks = dict(enumerate(blocks))
        self._begin_order()
        if held_bytes == 0:
            return
        for unit, block in self._order:
            if unit.index in self._whole:
                continue
            held_bytes -= unit.expected.state_room if unit.is_sparse else block.state_bytes
            if held_bytes < 0:
                return
            self._resident.add((unit.index, block.number))
            if unit.is_sparse or block.end == unit.elements:
                self._whole.add(unit.index)

    def _begin_order(self) -> None:
        self._order = [(u, b) for u in self._trained for b in self._blocks[u.index]]
        self._place = {(u.index, b.number): at for at, (u, b) in enumerate(self._order)}
        self._cursor = 0  # all blocks before this one are held

    def blocks(self, unit: Unit) -> Sequence[Block]:
        """Return the present blocks of a unit."""
        return self._blocks[unit.index]

    def change(self, blocks: Mapping[int, Sequence[Block]]) -> None:
        """Set the blocks of sparse weights, by unit; none of the old ones are held."""
        self._blocks |= blocks
        self._begin_order()

    def is_resident(self, unit: Unit, block: Block) -> bool:
        """Whether a block stays in memory between steps."""
        if unit.is_sparse:
            return unit.index in self._whole
        return (unit.index, block.number) in self._resident

    def holds(self, unit: Unit, block: Block) -> bool:
        """Whether a block's state is in memory and no thread works on the block."""
        return (unit.index, block.number) in self._held

    def first_missing(self) -> tuple[Unit, Block] | None:
        """Return the first block that is not held, in the order of the passes."""
        while self._cursor < len(self._order):
            unit, block = self._order[self._cursor]
            if not self.holds(unit, block):
                return unit, block
            self._cursor += 1
        return None

    def held(self, unit: Unit, block: Block) -> np.ndarray:
        """Return the memory of a block that is held."""
        return self._held[unit.index, block.number]

    def stay_whole(self, unit: Unit) -> bool:
        """Whether all blocks of a unit stay in memory between steps."""
        return unit.index in self._whole

    def take(self, unit: Unit, block: Block) -> np.ndarray | None:
        """Return the memory for work on a block; None if no memory is free. The memory contains the
        block's state if the block was held; otherwise the caller fills it."""
        key = (unit.index, block.number)
        if key in self._held:
            self._cursor = min(self._cursor, self._place[key])
            return self._held.pop(key)
        if self.is_resident(unit, block):
            return allocate(block.state_bytes)
        return self._spare.popleft() if self._spare else None

    def hold(self, unit: Unit, block: Block, memory: np.ndarray) -> None:
        """Keep the memory that `take` returned, with the block's state, until the next `take`."""
        self._held[unit.index, block.number] = memory

    def put_back(self, unit: Unit, block: Block, memory: np.ndarray) -> None:
        """Return the memory of `take` to the pool: its content is on flash."""
        if self.is_resident(unit, block):
            self._held[unit.index, block.number] = memory
        else:
            self._spare.append(memory)

    def release(self, unit: Unit, block: Block, memory: np.ndarray) -> None:
        """Return the memory of `take` to the pool: its content is of no more use."""
        if not self.is_resident(unit, block):
            self._spare.append(memory)

    @property
    def has_many_free(self) -> bool:
        """Whether more than half of the buffers are free."""
        return 2 * len(self._spare) > self._buffers

    def give_up(self) -> None:
        """Free the buffer of the last block that was read ahead, if more than half of the buffers
        hold such blocks."""
        ahead = [k for k in self._held if k not in self._resident and k[0] not in self._whole]
        if 2 * len(ahead) > self._buffers:
            self._spare.append(self._held.pop(max(ahead, key=self._place.__getitem__)))
            self._cursor = 0

    def invalidate(self, unit: Unit) -> None:
        """Forget the state of a unit that is held: it is not that of the last commit."""
        for block in self.blocks(unit):
            if self.holds(unit, block):
                memory = self.take(unit, block)
                assert memory is not None
                self.release(unit, block, memory)

    def forget(self) -> None:
        """Invalidate all held blocks."""
        for unit, block in self._order:
            if self.holds(unit, block):
                self.release(unit, block, self.held(unit, block))
        self._held.clear()
        self._cursor = 0
