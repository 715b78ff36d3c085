"""The content of a flash store, block by block as it lies on flash, in numbered portions.

A block is read once and compared with its checksum. On the writing side a block is assembled in
memory and its checksum is computed again. Two stores whose blocks have the same checksums have the
same content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from penstock.kernels.memory import allocate
from penstock.store.flash.layout import Block, FlashLayout, Unit
from penstock.store.flash.version import Version, checksum
from penstock.store.portions import require_size

_STREAM, _STATE = 0, 1


@dataclass(frozen=True)
class _Portion:
    """Bytes `begin` to `end` of a block's streamed values, or of its state."""

    unit: Unit
    block: Block
    half: int
    begin: int
    end: int

    @property
    def of(self) -> tuple[int, int, int]:
        """The half of the block that the portion belongs to."""
        return self.unit.index, self.block.number, self.half


class BlockPortions:
    """The portions of a flash store, in the order of its blocks.

    Args:
        version: the places of the blocks, and their checksums.
        put: writes to the file, at an offset.
    """

    def __init__(
        self,
        layout: FlashLayout,
        version: Version,
        put: Callable[[int, np.ndarray], None],
        portion_bytes: int,
    ) -> None:
        self._version, self._put = version, put
        self._portions = list(_cut(layout, portion_bytes))
        self._read_half: tuple[tuple[int, int, int], np.ndarray] | None = None
        self._next = 0  # the next portion to write
        self._gathered: list[np.ndarray] = [np.empty(0, np.uint8)] * 2
        self._checks: list[list[bytes]] = [[], []]  # checksums of the unit that is being written

    @property
    def sizes(self) -> Sequence[int]:
        """The number of bytes of each portion."""
        return [portion.end - portion.begin for portion in self._portions]

    def read(self, number: int) -> np.ndarray:
        """Return a portion; its half of a block is read completely, once, and verified.

        **Raises:** `CorruptionError` if the bytes have changed.
        """
        portion = self._portions[number]
        if self._read_half is None or self._read_half[0] != portion.of:
            data = allocate(_size(portion.unit, portion.block, portion.half))
            read = self._version.read_state if portion.half else self._version.read_stream
            read(portion.unit, portion.block, data)
            self._read_half = portion.of, data
        return self._read_half[1][portion.begin : portion.end]

    def write(self, number: int, data: np.ndarray) -> None:
        """Accept the next portion; a complete half of a block is written to its next place.

        Raises:
            RuntimeError: the portion is not the next one.
            ValueError: the portion has another size.
        """
        if number != self._next:
            raise RuntimeError(f"expected portion {self._next}, got portion {number}")
        portion = self._portions[number]
        require_size(number, data, portion.end - portion.begin)
        self._next += 1
        size = _size(portion.unit, portion.block, portion.half)
        if self._gathered[portion.half].nbytes < size:
            self._gathered[portion.half] = allocate(size)
        whole = self._gathered[portion.half][:size]
        whole[portion.begin : portion.end] = data
        if portion.end == size:
            self._write_block(portion.unit, portion.block, portion.half, whole)

    def _write_block(self, unit: Unit, block: Block, half: int, data: np.ndarray) -> None:
        place = self._version.next_place(unit)
        if half == _STREAM:
            self._put(unit.stream_offset(place, block.begin), data)
        else:
            self._put(unit.state_offset(place, block), data)
        self._checks[half].append(checksum(data))
        if half == _STREAM and not _size(unit, block, _STATE):
            self._checks[_STATE].append(checksum(data[:0]))
        if len(self._checks[_STATE]) == unit.block_count:
            self._version.advance(unit, self._checks, unit.blocks)
            self._checks = [[], []]

    def checksum(self) -> str:
        """Return a checksum over the checksums of all blocks."""
        return xxhash.xxh3_128_hexdigest(self._version.checksums)


def _cut(layout: FlashLayout, portion_bytes: int) -> Iterator[_Portion]:
    for unit in layout.units:
        for block in unit.blocks:
            for half in (_STREAM, _STATE):
                size = _size(unit, block, half)
                for begin in range(0, size, portion_bytes):
                    yield _Portion(unit, block, half, begin, min(begin + portion_bytes, size))


def _size(unit: Unit, block: Block, half: int) -> int:
    return block.state_bytes if half else block.elements * unit.stream_width
