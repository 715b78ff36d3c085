"""The content of a flash store, block by block as it lies on flash, in numbered portions.

A block is read once and compared with its checksum. On the writing side a block is assembled in
memory and its checksum is computed again. Two stores whose blocks have the same checksums have the
same content.

With masks, the first portion is a table: the history of the masks, and the size of each. The masks
follow. The receiver knows their portions once it has the table, and the blocks, which follow from
the masks, once it has the masks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from penstock.errors import CorruptionError
from penstock.kernels.memory import allocate
from penstock.sparsity import compact_bytes, index_from_compact
from penstock.store.flash.layout import Block, FlashLayout, Unit
from penstock.store.flash.stored_masks import MaskHistory
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
        masks: the portions of the masks before these, if steps may change masks.
    """

    def __init__(
        self,
        layout: FlashLayout,
        version: Version,
        put: Callable[[int, np.ndarray], None],
        portion_bytes: int,
        masks: MaskPortions | None = None,
    ) -> None:
        self._layout, self._version, self._put = layout, version, put
        self._portion_bytes, self._masks = portion_bytes, masks
        self._portions: list[_Portion] | None = None
        self._read_half: tuple[tuple[int, int, int], np.ndarray] | None = None
        self._next = 0  # the next portion to write
        self._gathered: list[np.ndarray] = [np.empty(0, np.uint8)] * 2
        self._checks: list[list[bytes]] = [[], []]  # checksums of the unit that is being written
        self._stream = np.empty(0, np.uint8)  # of the sparse weight that is being written

    @property
    def _blocks(self) -> Sequence[_Portion]:
        """The portions of blocks; none while masks are missing."""
        if self._portions is None:
            if self._masks is not None and not self._masks.is_complete:
                return ()
            self._portions = list(_cut(self._layout, self._version, self._portion_bytes))
        return self._portions

    @property
    def _masks_count(self) -> int:
        return 0 if self._masks is None else len(self._masks.sizes)

    @property
    def sizes(self) -> Sequence[int]:
        """The number of bytes of each portion, as far as they are known."""
        masks = [] if self._masks is None else self._masks.sizes
        return [*masks, *(portion.end - portion.begin for portion in self._blocks)]

    def read(self, number: int) -> np.ndarray:
        """Return a portion; its half of a block is read completely, once, and verified.

        **Raises:** `CorruptionError` if the bytes have changed.
        """
        if self._masks is not None and number < self._masks_count:
            return self._masks.read(number)
        portion = self._blocks[number - self._masks_count]
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
            CorruptionError: the table or a mask is not one of this store.
        """
        if number != self._next:
            raise RuntimeError(f"expected portion {self._next}, got portion {number}")
        if self._masks is not None and not self._masks.is_complete:
            self._masks.write(number, data)
            self._next += 1
            return
        portion = self._blocks[number - self._masks_count]
        require_size(number, data, portion.end - portion.begin)
        self._next += 1
        size = _size(portion.unit, portion.block, portion.half)
        if self._gathered[portion.half].nbytes < size:
            self._gathered[portion.half] = allocate(size)
        whole = self._gathered[portion.half][:size]
        whole[portion.begin : portion.end] = data
        if portion.end == size:
            self._write_half(portion.unit, portion.block, portion.half, whole)

    def _write_half(self, unit: Unit, block: Block, half: int, data: np.ndarray) -> None:
        blocks = self._version.blocks(unit)
        if half == _STATE:
            self._put(unit.state_offset(self._version.next_place(unit), block), data)
        else:
            self._write_stream(unit, block, data)
        self._checks[half].append(checksum(data))
        if half == _STREAM and not _size(unit, block, _STATE):
            self._checks[_STATE].append(checksum(data[:0]))
        if len(self._checks[_STATE]) == len(blocks):
            self._version.advance(unit, self._checks, blocks)
            self._checks = [[], []]

    def _write_stream(self, unit: Unit, block: Block, data: np.ndarray) -> None:
        """Write a block's streamed values: those of a sparse weight together, since its blocks end
        within pages."""
        begin = unit.stream_offset(self._version.next_place(unit))
        first = block.begin * unit.stream_width
        if not unit.is_sparse:
            self._put(begin + first, data)
            return
        blocks = self._version.blocks(unit)
        if block is blocks[0]:
            self._stream = allocate(unit.used_stream_bytes(blocks))
        self._stream[first : first + data.nbytes] = data
        if block is blocks[-1]:
            self._put(begin, self._stream)
            self._stream = np.empty(0, np.uint8)

    def checksum(self) -> str:
        """Return a checksum over the checksums of all blocks, and of the masks' history."""
        history = b"" if self._masks is None else json.dumps(self._masks.history).encode()
        return xxhash.xxh3_128_hexdigest(self._version.checksums + history)


class MaskPortions:
    """The portions of a flash store's masks, after a table. One mask at a time is in compact form.

    Args:
        layout, version, put, portion_bytes: as for `BlockPortions`.
        history: of the masks that are sent; None if they are received.
        received: called when all masks have been received, and are in `version`.
    """

    def __init__(
        self,
        layout: FlashLayout,
        version: Version,
        put: Callable[[int, np.ndarray], None],
        portion_bytes: int,
        *,
        history: MaskHistory | None,
        received: Callable[[], None],
    ) -> None:
        self._units, self._version, self._put = layout.sparse, version, put
        self._portion_bytes, self._received = portion_bytes, received
        self._table = np.empty(0, np.uint8)
        self._pieces: list[tuple[int, int, int]] = []  # number of the mask, begin, end
        self._sizes: list[tuple[int, int]] = []  # entries of each mask, and its bytes
        self._mask = -1, np.empty(0, np.uint8)  # the one that is sent or received
        self.is_complete = history is not None
        if history is not None:
            version.masks.history = history
            kept = [version.masks.index(unit).kept for unit in self._units]
            sizes = [self._compact(number).size for number in range(len(self._units))]
            plain = {"history": self.history, "masks": [*zip(kept, sizes, strict=True)]}
            self._table = np.frombuffer(json.dumps(plain).encode(), np.uint8)
            self._cut(plain["masks"])

    @property
    def history(self) -> list[Any]:
        """The history as plain data: numbers of updates, and those at the changes of each mask."""
        history = self._version.masks.history
        if history is None:
            return []
        return [history.updates, [[*history.changes[u.names[0]]] for u in self._units]]

    def _compact(self, number: int) -> np.ndarray:
        """Return a mask that is sent, in its compact form."""
        if self._mask[0] != number:
            data = compact_bytes(self._version.masks.index(self._units[number]))
            self._mask = number, np.frombuffer(data, np.uint8)
        return self._mask[1]

    def _cut(self, sizes: Sequence[tuple[int, int]]) -> None:
        self._sizes = list(sizes)
        self._pieces = [
            (number, begin, min(begin + self._portion_bytes, size))
            for number, (_, size) in enumerate(sizes)
            for begin in range(0, size, self._portion_bytes)
        ]

    @property
    def sizes(self) -> Sequence[int]:
        """The number of bytes of each portion; before the table has arrived, of the table alone."""
        return [self._table.nbytes, *(end - begin for _, begin, end in self._pieces)]

    def read(self, number: int) -> np.ndarray:
        """Return a portion."""
        if number == 0:
            return self._table
        mask, begin, end = self._pieces[number - 1]
        return self._compact(mask)[begin:end]

    def write(self, number: int, data: np.ndarray) -> None:
        """Accept the next portion; errors are those of `BlockPortions.write`."""
        if number == 0:
            self._take_table(data)
        else:
            mask, begin, end = self._pieces[number - 1]
            require_size(number, data, end - begin)
            if begin == 0:
                self._mask = mask, np.empty(self._sizes[mask][1], np.uint8)
            self._mask[1][begin:end] = data
            if end == self._sizes[mask][1]:
                self._take_mask(mask)
        if number == len(self._pieces):
            self.is_complete = True
            self._received()

    def _take_table(self, data: np.ndarray) -> None:
        try:
            plain = json.loads(data.tobytes())
            updates, changes = plain["history"]
            _require_counts([updates, *(number for each in changes for number in each)])
            sizes = [(kept, size) for kept, size in plain["masks"]]
            for unit, (kept, size) in zip(self._units, sizes, strict=True):
                _require_counts([kept, size])
                if kept > unit.capacity or not 0 < size <= unit.mask_room:
                    raise ValueError(f"{kept} entries in {size} bytes of {unit.names[0]}")
            names = (unit.names[0] for unit in self._units)
            by_weight = dict(zip(names, map(tuple, changes), strict=True))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CorruptionError(
                f"portion 0: expected a table of masks, got invalid bytes ({error}); do all nodes "
                "run the same version of Penstock with the same configuration?"
            ) from None
        self._version.masks.history = MaskHistory(updates, by_weight)
        self._table = np.array(data)
        self._cut(sizes)

    def _take_mask(self, number: int) -> None:
        """Write a mask to its next place; the blocks of its weight are now known."""
        unit, data = self._units[number], self._mask[1].tobytes()
        index = index_from_compact(data, unit.sizes[0], self._sizes[number][0], unit.origins[0])
        self._version.masks.write(unit, index, self._put)
        blocks = self._version.take_mask(unit)
        if not index.kept:  # no portion of a block follows
            nothing = [checksum(np.empty(0, np.uint8))]
            self._version.advance(unit, [nothing, nothing], blocks)


def _require_counts(found: Sequence[Any]) -> None:
    for number in found:
        if type(number) is not int or not 0 <= number < 2**63:
            raise ValueError(f"expected a count, got {str(number)[:40]!r}")


def _cut(layout: FlashLayout, version: Version, portion_bytes: int) -> Iterator[_Portion]:
    for unit in layout.units:
        for block in version.blocks(unit):
            for half in (_STREAM, _STATE):
                size = _size(unit, block, half)
                for begin in range(0, size, portion_bytes):
                    yield _Portion(unit, block, half, begin, min(begin + portion_bytes, size))


def _size(unit: Unit, block: Block, half: int) -> int:
    return block.state_bytes if half else block.elements * unit.stream_width
