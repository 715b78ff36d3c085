"""The writer of a flash store: a thread that writes what it is handed, in that order.

Blocks and weights of updated units go to new places. A step is sealed in the journal after all
earlier writes. Gradients that do not fit in memory go to a file of their own. Blocks and weights of
a speculative update are not written any more once the update was thrown away.
"""

import queue
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.io import failpoints
from penstock.sparsity import PackedIndex
from penstock.store.flash.blocks import StateBlocks
from penstock.store.flash.changing_weight import ChangedWeight
from penstock.store.flash.extent_writes import ExtentWrites
from penstock.store.flash.frames import Frames
from penstock.store.flash.layout import Block, Unit
from penstock.store.flash.monitor import Monitor
from penstock.store.flash.speculation import Branch
from penstock.store.flash.spill import GradientSpill
from penstock.store.flash.stored_masks import MaskHistory
from penstock.store.flash.version import Version
from penstock.store.masks import Masks

_Job = tuple[Callable[[], int], Callable[[], object]]
"""A job, which returns the bytes written, and what it then does under the lock."""


class Writer:
    """Its methods are called under the monitor's lock; `run` is the work of its thread.

    Args:
        frames: the weights in memory.
        state: the blocks of optimizer state in memory.
        spill: the gradients on flash.
        masks: those of the sparse weights.
    """

    def __init__(
        self,
        monitor: Monitor,
        version: Version,
        writes: ExtentWrites,
        frames: Frames,
        *,
        state: StateBlocks,
        spill: GradientSpill,
        masks: Masks,
    ) -> None:
        self._monitor, self._version, self._writes = monitor, version, writes
        self._frames, self._state, self._spill, self._masks = frames, state, spill, masks
        # The masks that are on flash, or that must still be written, by unit.
        self.masks: dict[int, PackedIndex] = {}
        self.unwritten: set[int] = set()  # units that must still be written
        # Gradients that must still be written, by unit; a replayed step adds to them.
        self.spilling: Counter[int] = Counter()
        self.slabs = deque(spill.slabs)  # free ones
        self.written_bytes = 0
        self.seals = 0  # steps that must still be sealed
        self.pending = 0  # unfinished jobs
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Do the jobs until `end`."""
        while (job := self._jobs.get()) is not None:
            write, finish = job
            written = write()
            with self._monitor.changed:
                self.pending -= 1
                self.written_bytes += written
                finish()
                self._monitor.changed.notify_all()

    def end(self) -> None:
        """End the thread after the jobs that it has."""
        self._jobs.put(None)

    def _hand(self, write: Callable[[], int], finish: Callable[[], object]) -> None:
        self.pending += 1
        self._jobs.put((write, finish))

    def block(
        self, unit: Unit, block: Block, buffer: np.ndarray, branch: Branch | None = None
    ) -> None:
        """Write the state of a block; `branch` has its update if that is speculative."""
        write = partial(self._writes.state, unit, block, buffer[: block.state_bytes])
        finish = partial(self._finish_block, unit, block, buffer, branch)
        self._hand(write if branch is None else branch.unless_dropped(write), finish)

    def _finish_block(
        self, unit: Unit, block: Block, buffer: np.ndarray, branch: Branch | None
    ) -> None:
        if branch is not None and branch.is_dropped:
            self._state.release(unit, block, buffer)
        else:
            self._state.put_back(unit, block, buffer)
        if branch is not None:
            branch.busy -= 1

    def weights(self, unit: Unit, checks: list[list[bytes]], branch: Branch | None = None) -> None:
        """Write the weights of a unit after all its blocks, and its mask if that has changed."""
        self.unwritten.add(unit.index)
        blocks, index = self._state.blocks(unit), self._masks.index(unit.names[0])
        if index is not None and index is not self.masks[unit.index]:
            self.masks[unit.index] = index
            self._hand(partial(self._writes.mask, unit, index), lambda: None)
        write = partial(self._writes.weights, unit, blocks, self._frames[unit.index])
        if branch is not None:
            branch.busy += 1
        finish = partial(self._finish_weights, unit, checks, blocks, branch)
        self._hand(write if branch is None else branch.unless_dropped(write), finish)

    def _finish_weights(
        self,
        unit: Unit,
        checks: list[list[bytes]],
        blocks: Sequence[Block],
        branch: Branch | None,
    ) -> None:
        if branch is None or branch.is_adopted:
            self._version.advance(unit, checks, blocks)
        else:  # what was thrown away is written nowhere
            branch.written[unit.index] = blocks
        self.unwritten.discard(unit.index)
        if branch is not None:
            branch.busy -= 1

    def changed_weight(
        self, unit: Unit, changed: ChangedWeight, finish: Callable[[], object]
    ) -> None:
        """Write all the state of a weight with a new mask, and then call `finish`."""
        self._hand(partial(self._writes.state, unit, changed.blocks[0], changed.state), finish)

    def gradient(self, unit: Unit, slab: np.ndarray) -> None:
        """Write a unit's gradient from a slab, which is free then."""
        self.spilling[unit.index] += 1
        write = partial(self._write_gradient, unit, self._state.blocks(unit), slab)
        self._hand(write, partial(self._return_slab, unit, slab))

    def _write_gradient(self, unit: Unit, blocks: Sequence[Block], slab: np.ndarray) -> int:
        failpoints.point("flash.before_gradient")
        return self._spill.write(unit, blocks, slab)

    def _return_slab(self, unit: Unit, slab: np.ndarray) -> None:
        self.spilling[unit.index] -= 1
        self.slabs.append(slab)

    def seal(self, step: int, extra: Mapping[str, Any], history: MaskHistory | None) -> None:
        """Make a step durable, after all earlier jobs."""
        self.seals += 1
        self._hand(partial(self._writes.seal, step, dict(extra), history), self._finish_seal)

    def _finish_seal(self) -> None:
        self.seals -= 1
