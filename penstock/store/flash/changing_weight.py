"""The pending update of a sparse weight whose mask changes: all of its state is in memory at once.

Its blocks are read and updated as in other steps. They are then gathered, because the change moves
entries between blocks, and cut again by the new mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.kernels.memory import allocate
from penstock.sparsity import Remap
from penstock.store.codecs import decode
from penstock.store.flash.layout import Block, Unit
from penstock.store.flash.version import block_parts, checksum, weight_parts
from penstock.store.masks import Masks
from penstock.store.optimizer_state import move_state
from penstock.store.optimizers import scale_of
from penstock.store.packed import length_of


@dataclass(frozen=True)
class ChangedWeight:
    """A weight after the change of its mask: its blocks, their state, and their checksums."""

    blocks: Sequence[Block]
    state: np.ndarray
    checks: list[list[bytes]]

    def state_of(self, block: Block) -> np.ndarray:
        """Return the memory of a block's state."""
        return self.state[block.state_begin : block.state_begin + block.state_bytes]


class ChangingWeight:
    """Gathers the blocks of one weight, in their order.

    Args:
        unit: the weight.
        blocks: its blocks before the change.
        masks: has the pending change.
    """

    def __init__(self, unit: Unit, blocks: Sequence[Block], masks: Masks) -> None:
        self._unit, self._masks = unit, masks
        self._name = unit.names[0]
        self._kept = blocks[-1].end
        self._magnitudes = np.empty(self._kept, np.float32)
        rest = {part.name: (part.dtype, self._kept) for part in unit.format.rest}
        roles = {r.name: (r.dtype, sum(b.count(r) for b in blocks)) for r in unit.roles}
        self._old = {n: np.empty(size, dtype) for n, (dtype, size) in (rest | roles).items()}
        self._gathered = dict.fromkeys(self._old, 0)

    def note(self, block: Block, frame: np.ndarray, state: np.ndarray) -> None:
        """Keep the values by which entries were selected: those before the update."""
        stream = _stream_of(self._unit, frame)[block.begin : block.end]
        weight = weight_parts(self._unit, block, stream, state)
        self._magnitudes[block.begin : block.end] = decode(
            self._unit.format, weight, 0, block.elements
        )

    def gather(self, block: Block, state: np.ndarray) -> None:
        """Keep a copy of a block's state after the update."""
        for name, part in block_parts(self._unit, block, state).items():
            begin = self._gathered[name]
            self._gathered[name] = begin + part.size
            self._old[name][begin : begin + part.size] = part

    def finish(self, frame: np.ndarray) -> ChangedWeight:
        """Make the change: of the mask, of the streamed values in `frame`, and of the state."""
        unit = self._unit
        remap = self._masks.remap(self._name, lambda name: self._magnitudes)
        assert remap is not None
        before = self._masks.replace(self._name, remap)
        stream = _stream_of(unit, frame)
        stream[: remap.index.kept] = remap.move(stream[: self._kept])
        blocks = unit.blocks_of(remap.index)
        state = allocate(blocks[-1].state_begin + blocks[-1].state_bytes)
        changed = ChangedWeight(blocks, state, [[], []])
        for part in unit.format.rest:
            self._scatter(changed, part.name, remap.move(self._old.pop(part.name)))
        for role in [r.name for r in unit.roles if r.name in self._unscaled]:
            both = [name for name in (role, scale_of(role)) if name in self._old]
            old = {name: self._old.pop(name) for name in both}
            new = {name: self._empty(name, remap) for name in both}
            move_state(self._name, old, new, before, remap, self._masks.updates)
            for name, array in new.items():
                self._scatter(changed, name, array)
        for block in blocks:
            streamed = stream[block.begin : block.end]
            changed.checks[0].append(checksum(streamed.view(np.uint8)))
            changed.checks[1].append(checksum(changed.state_of(block)))
        return changed

    @property
    def _unscaled(self) -> set[str]:
        """The roles that are not the scales of others."""
        names = {role.name for role in self._unit.roles}
        return names - {scale_of(name) for name in names}

    def _empty(self, role: str, remap: Remap) -> np.ndarray:
        kind = self._unit.role(role)
        return np.empty(length_of(remap.index, kind.group), kind.numpy)

    def _scatter(self, changed: ChangedWeight, name: str, values: np.ndarray) -> None:
        begin = 0
        for block in changed.blocks:
            part = block_parts(self._unit, block, changed.state_of(block))[name]
            part[:] = values[begin : begin + part.size]
            begin += part.size


def _stream_of(unit: Unit, frame: np.ndarray) -> np.ndarray:
    """Return the streamed values of a unit, whose memory is `frame`."""
    return frame.view(unit.format.stream.dtype)
