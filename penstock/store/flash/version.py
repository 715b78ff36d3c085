"""A version of the whole state: the places of each unit's extents and mask, with checksums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from penstock.errors import CorruptionError
from penstock.kernels.memory import allocate
from penstock.kernels.split_master import Weight
from penstock.store.codecs import decode
from penstock.store.content_hash import hash_read
from penstock.store.flash.journal import REPAIR, Record
from penstock.store.flash.layout import Block, FlashLayout, Unit
from penstock.store.flash.medium import ALIGNMENT_BYTES, ExtentFile
from penstock.store.flash.stored_masks import CHECKSUM_BYTES, MaskHistory, StoredMasks
from penstock.store.packed import dense_values
from penstock.store.roles import MASTER, VALUES, holds_weight

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex


def checksum(data: np.ndarray) -> bytes:
    """Return the checksum of a block's stream or state."""
    return xxhash.xxh3_128_digest(data.data)


class Version:
    """The present place and checksums of every unit; updated when a unit is written."""

    def __init__(self, layout: FlashLayout, file: ExtentFile) -> None:
        self._layout = layout
        self._file = file
        self._place = [0] * len(layout.units)
        self._is_sealed = [True] * len(layout.units)
        self._checks = [(b"", b"") for _ in layout.units]
        self.masks = StoredMasks(layout, file)
        self._sparse_blocks: dict[int, Sequence[Block]] = {}

    def blocks(self, unit: Unit) -> Sequence[Block]:
        """Return the blocks of a unit; those of a sparse weight follow from its mask."""
        if not unit.is_sparse:
            return unit.blocks
        if unit.index not in self._sparse_blocks:
            self._sparse_blocks[unit.index] = unit.blocks_of(self.masks.index(unit))
        return self._sparse_blocks[unit.index]

    def take_mask(self, unit: Unit) -> Sequence[Block]:
        """Return the blocks of a sparse weight whose new mask was written; its extents are not."""
        self._sparse_blocks[unit.index] = unit.blocks_of(self.masks.index(unit))
        return self._sparse_blocks[unit.index]

    def record(
        self, step: int, extra: Mapping[str, Any], history: MaskHistory | None = None
    ) -> Record:
        """Return the journal record of this version; its places are not overwritten from then
        on.

        **Arguments:** `history` is that of the masks at this step, if weights are sparse.
        """
        self._is_sealed = [True] * len(self._layout.units)
        content = {"step": step, "places": list(self._place), "extra": dict(extra)}
        return Record(content | self.masks.record(history), self.checksums)

    @property
    def checksums(self) -> bytes:
        """The checksums of all blocks, a unit's stream, then its state; then those of all masks."""
        return b"".join(map(self.checksums_of, self._layout.units)) + self.masks.checksums

    def checksums_of(self, unit: Unit) -> bytes:
        """The checksums of a unit's blocks."""
        return b"".join(self._checks[unit.index])

    def restore(self, record: Record) -> None:
        """Become the version that a record describes.

        Raises:
            CorruptionError: the record does not fit the layout, or a mask has changed.
        """
        self.masks.restore(record)
        self._sparse_blocks.clear()
        begin = 0
        for unit in self._layout.units:
            # Arithmetic for dense units: a forged description may claim any number of blocks.
            count = len(self.blocks(unit)) if unit.is_sparse else unit.block_count
            size = count * CHECKSUM_BYTES
            halves = (begin, begin + size, begin + 2 * size)
            self._checks[unit.index] = (
                record.blob[halves[0] : halves[1]],
                record.blob[halves[1] : halves[2]],
            )
            begin += 2 * size
        places = record.content.get("places")
        begin += len(self.masks.checksums)
        if begin != len(record.blob) or not _are_places(places, self._layout.units):
            raise CorruptionError(
                f"{self._file.path}: the journal's record of step {record.content.get('step')} "
                "does not match the store"
            )
        self._place = list(places or [])
        self._is_sealed = [True] * len(self._layout.units)

    def places_behind(self, newest: Version) -> int:
        """Return how many versions ago these places were written; 0 for `newest`."""
        units = self._layout.units
        behind = max((newest._place[u.index] - self._place[u.index]) % u.places for u in units)
        return max(behind, self.masks.places_behind(newest.masks))

    def next_place(self, unit: Unit) -> int:
        """Return the next place of a unit; no record names that place."""
        place = self._place[unit.index]
        return (place + 1) % unit.places if self._is_sealed[unit.index] else place

    def advance(
        self, unit: Unit, checks: Sequence[Iterable[bytes]], blocks: Sequence[Block]
    ) -> None:
        """Record that a whole unit was written to its next place.

        Args:
            unit: the unit.
            checks: the checksums of its blocks' streams, and of their states.
            blocks: its blocks, which change with the mask of a sparse weight.
        """
        if unit.is_sparse:
            self._sparse_blocks[unit.index] = blocks
        self._place[unit.index] = self.next_place(unit)
        self._is_sealed[unit.index] = False
        streams, states = checks
        self._checks[unit.index] = (b"".join(streams), b"".join(states))

    def read_stream(self, unit: Unit, block: Block, into: np.ndarray) -> None:
        """Read the streamed values of a block.

        Raises:
            CorruptionError: the bytes have changed; the message gives the place and both checksums.
        """
        offset = unit.stream_offset(self._place[unit.index], block.begin)
        aligned = offset // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if not unit.is_sparse:
            self._file.read(offset, into)
        elif into.nbytes:  # blocks of a sparse weight begin and end within pages
            end = -(-(offset + into.nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            self._file.read(aligned, pages := allocate(end - aligned))
            into[:] = pages[offset - aligned : offset - aligned + into.nbytes]
        self._check(unit, block, into, 0, offset)

    def read_frame(self, unit: Unit, into: np.ndarray) -> int:
        """Read all streamed values of a unit at once: large reads are faster; return the bytes."""
        offset, width = unit.stream_offset(self._place[unit.index]), unit.stream_width
        blocks = self.blocks(unit)
        used = into[: unit.used_stream_bytes(blocks)]
        self._file.read(offset, used)
        for block in blocks:
            part = into[block.begin * width : block.end * width]
            self._check(unit, block, part, 0, offset + block.begin * width)
        return used.nbytes

    def read_state(self, unit: Unit, block: Block, into: np.ndarray) -> None:
        """Read a block's optimizer state and the parts of its format that are not streamed; errors
        as above."""
        self.fetch_state(unit, block, into)
        self.check_state(unit, block, into)

    def fetch_state(self, unit: Unit, block: Block, into: np.ndarray) -> None:
        """Read a block's state; the caller must verify it."""
        if into.nbytes:
            self._file.read(unit.state_offset(self._place[unit.index], block), into)

    def check_state(self, unit: Unit, block: Block, data: np.ndarray) -> None:
        """Verify data that `fetch_state` has read."""
        if data.nbytes:
            offset = unit.state_offset(self._place[unit.index], block)
            self._check(unit, block, data, 1, offset)

    def _check(self, unit: Unit, block: Block, data: np.ndarray, half: int, offset: int) -> None:
        at = block.number * CHECKSUM_BYTES
        expected = self._checks[unit.index][half][at : at + CHECKSUM_BYTES]
        found = checksum(data)
        if found == expected:
            return
        held = ", ".join(piece[0] for piece in unit.pieces(block)[:3])
        raise CorruptionError(
            f"{self._file.path}: damaged in bytes {offset:,} to {offset + data.nbytes:,}, which "
            f"hold {'the state' if half else 'the weights'} of {held}: expected checksum "
            f"{expected.hex()}, got {found.hex()}; {REPAIR}"
        )

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return values `begin` to `end` of a weight or of its state, flat."""
        unit = self._layout.unit(name)
        kind = unit.role(role)
        if unit.is_sparse and role == MASTER:
            index = self.masks.index(unit)
            return dense_values(index, lambda b, e: self.read(name, VALUES, b, e), begin, end)
        found = np.empty(end - begin, kind.numpy)
        origin, at = self._layout.begin_of(name) // kind.group, 0
        for block in self.blocks(unit):
            after = at + block.count(kind)
            first, last = max(origin + begin, at), min(origin + end, after)
            if first < last:
                values = self._read_block(unit, block, role)
                found[first - origin - begin : last - origin - begin] = values[
                    first - at : last - at
                ]
            at = after
        return found

    def _read_block(self, unit: Unit, block: Block, role: str) -> np.ndarray:
        state = allocate(block.state_bytes)
        if not holds_weight(role):
            self.read_state(unit, block, state)
            return state_roles(unit, block, state)[role]
        stream = allocate(block.elements * unit.stream_width)
        self.read_stream(unit, block, stream)
        if unit.format.rest:
            self.read_state(unit, block, state)
        weight = weight_parts(unit, block, stream, state)
        return decode(unit.format, weight, 0, block.elements)

    def mask(self, name: str) -> PackedIndex | None:
        """Return the mask of a weight; None if the weight is dense."""
        unit = self._layout.unit(name)
        return self.masks.index(unit) if unit.is_sparse else None

    def verify(self) -> None:
        """Read every mask and every block; raise `CorruptionError` at the first that has
        changed."""
        self.masks.verify()
        for unit in self._layout.units:
            for block in self.blocks(unit):
                self.read_stream(unit, block, allocate(block.elements * unit.stream_width))
                self.read_state(unit, block, allocate(block.state_bytes))

    def content_hash(self) -> str:
        """Return the hash of all weights (`content_hash.py`)."""
        return hash_read(self._layout.shapes, self.read_weight, self.mask)

    def read_weight(self, name: str, begin: int, end: int) -> np.ndarray:
        """Return elements of a weight, float32; of a sparse weight, entries."""
        role = VALUES if self._layout.unit(name).is_sparse else MASTER
        return self.read(name, role, begin, end)


def weight_parts(unit: Unit, block: Block, stream: np.ndarray, state: np.ndarray) -> Weight:
    """Return the arrays of a block's weights in its stream and in its state."""
    parts = block_parts(unit, block, state)
    rest = (parts[part.name] for part in unit.format.rest)
    return (stream.view(unit.format.stream.dtype), *rest)


def state_roles(unit: Unit, block: Block, state: np.ndarray) -> dict[str, np.ndarray]:
    """Return the optimizer's roles in a block's state."""
    parts = block_parts(unit, block, state)
    return {role.name: parts[role.name] for role in unit.roles}


def block_parts(unit: Unit, block: Block, state: np.ndarray) -> dict[str, np.ndarray]:
    """Return all arrays in a block's state: the parts of its format, and the optimizer's roles."""
    return {
        name: state[begin : begin + count * dtype.itemsize].view(dtype)
        for name, dtype, begin, count in unit.state_parts(block)
    }


def recorded_step(path: Path, record: Record) -> tuple[int, dict[str, Any]]:
    """Return the step that a record makes durable, and the data kept with it.

    Raises:
        CorruptionError: the record is not such a record of the journal `path`.
    """
    match record.content:
        case {"step": int(step), "extra": dict(extra)} if type(step) is int and 0 <= step < 2**63:
            return step, dict(extra)
    raise CorruptionError(f"{path}: a record does not describe a step; restore it from a copy")


def state_slices(unit: Unit, state: Mapping[str, np.ndarray], here: slice) -> dict[str, np.ndarray]:
    """Return the values of each role that belong to these elements of a block."""
    return {
        role.name: state[role.name][here.start // role.group : role.count(here.stop)]
        for role in unit.roles
    }


def _are_places(found: Any, units: tuple[Unit, ...]) -> bool:
    if not isinstance(found, list) or len(found) != len(units):
        return False
    return all(
        type(place) is int and 0 <= place < unit.places
        for place, unit in zip(found, units, strict=True)
    )
