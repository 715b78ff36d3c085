"""A version of the whole state: the places of each unit's extents, and their checksums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from penstock.errors import CorruptionError
from penstock.kernels.memory import allocate
from penstock.kernels.split_master import Weight
from penstock.store.codecs import decode
from penstock.store.content_hash import hash_read
from penstock.store.flash.journal import Record
from penstock.store.flash.layout import Block, FlashLayout, Unit
from penstock.store.flash.medium import ExtentFile
from penstock.store.roles import MASTER

CHECKSUM_BYTES = 16


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

    def record(self, step: int, extra: Mapping[str, Any]) -> Record:
        """Return the journal record of this version; its places are not overwritten from then
        on."""
        self._is_sealed = [True] * len(self._layout.units)
        content = {"step": step, "places": list(self._place), "extra": dict(extra)}
        return Record(content, self.checksums)

    @property
    def checksums(self) -> bytes:
        """The checksums of all blocks: a unit's stream, then its state."""
        return b"".join(map(self.checksums_of, self._layout.units))

    def checksums_of(self, unit: Unit) -> bytes:
        """The checksums of a unit's blocks."""
        return b"".join(self._checks[unit.index])

    def restore(self, record: Record) -> None:
        """Become the version that a record describes.

        Raises:
            CorruptionError: the record does not fit the layout.
        """
        begin = 0
        for unit in self._layout.units:
            size = unit.block_count * CHECKSUM_BYTES
            halves = (begin, begin + size, begin + 2 * size)
            self._checks[unit.index] = (
                record.blob[halves[0] : halves[1]],
                record.blob[halves[1] : halves[2]],
            )
            begin += 2 * size
        places = record.content.get("places")
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
        return max((newest._place[u.index] - self._place[u.index]) % u.places for u in units)

    def next_place(self, unit: Unit) -> int:
        """Return the next place of a unit; no record names that place."""
        place = self._place[unit.index]
        return (place + 1) % unit.places if self._is_sealed[unit.index] else place

    def advance(self, unit: Unit, streams: Iterable[bytes], states: Iterable[bytes]) -> None:
        """Record that a whole unit was written to its next place, with these checksums."""
        self._place[unit.index] = self.next_place(unit)
        self._is_sealed[unit.index] = False
        self._checks[unit.index] = (b"".join(streams), b"".join(states))

    def read_stream(self, unit: Unit, block: Block, into: np.ndarray) -> None:
        """Read the streamed values of a block.

        Raises:
            CorruptionError: the bytes have changed; the message gives the place and both checksums.
        """
        offset = unit.stream_offset(self._place[unit.index], block.begin)
        self._file.read(offset, into)
        self._check(unit, block, into, 0, offset)

    def read_frame(self, unit: Unit, into: np.ndarray) -> None:
        """Read all streamed values of a unit at once: large reads are faster."""
        offset, width = unit.stream_offset(self._place[unit.index]), unit.stream_width
        self._file.read(offset, into)
        for block in unit.blocks:
            part = into[block.begin * width : block.end * width]
            self._check(unit, block, part, 0, offset + block.begin * width)

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
            f"{expected.hex()}, got {found.hex()}; `penstock inspect --repair` rolls back to the "
            "previous durable step, if that step is intact"
        )

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return values `begin` to `end` of a weight or of its state, flat."""
        unit, origin = self._layout.unit(name), self._layout.begin_of(name)
        kind = unit.role(role)
        found = np.empty(end - begin, kind.numpy)
        origin //= kind.group
        for block in unit.blocks:
            here, there = block.begin // kind.group, block.end // kind.group
            first, last = max(origin + begin, here), min(origin + end, there)
            if first < last:
                values = self._read_block(unit, block, role)
                found[first - origin - begin : last - origin - begin] = values[
                    first - here : last - here
                ]
        return found

    def _read_block(self, unit: Unit, block: Block, role: str) -> np.ndarray:
        state = allocate(unit.state_bytes(block.elements))
        if role != MASTER:
            self.read_state(unit, block, state)
            return state_roles(unit, block, state)[role]
        stream = allocate(block.elements * unit.stream_width)
        self.read_stream(unit, block, stream)
        if unit.format.rest:
            self.read_state(unit, block, state)
        weight = weight_parts(unit, block, stream, state)
        return decode(unit.format, weight, 0, block.elements)

    def verify(self) -> None:
        """Read every block; raise `CorruptionError` at the first block that has changed."""
        for unit in self._layout.units:
            for block in unit.blocks:
                self.read_stream(unit, block, allocate(block.elements * unit.stream_width))
                self.read_state(unit, block, allocate(unit.state_bytes(block.elements)))

    def content_hash(self) -> str:
        """Return the hash of all weights (`content_hash.py`)."""
        return hash_read(
            self._layout.shapes, lambda name, begin, end: self.read(name, MASTER, begin, end)
        )


def weight_parts(unit: Unit, block: Block, stream: np.ndarray, state: np.ndarray) -> Weight:
    """Return the arrays of a block's weights in its stream and in its state."""
    parts, begin = [stream.view(unit.format.stream.dtype)], 0
    for part in unit.format.rest:
        end = begin + part.width * block.elements
        parts.append(state[begin:end].view(part.dtype))
        begin = end
    return tuple(parts)


def state_roles(unit: Unit, block: Block, state: np.ndarray) -> dict[str, np.ndarray]:
    """Return the optimizer's roles in a block's state."""
    roles, begin = {}, unit.format.rest_width * block.elements
    for role in unit.roles:
        end = begin + role.bytes(block.elements)
        roles[role.name] = state[begin:end].view(role.numpy)
        begin = end
    return roles


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
