"""A mask as bytes: the gaps between its kept entries, in granules that decode by themselves.

The mask is over the elements of a weight in dense row-major order. Every granule of 4096 elements
starts its count anew, so any range of granules is a mask of its own: the part of a shard is cut out
without decoding. A gap takes one byte, and one more per 255 absent entries
(`kernels/gap_codes.py`). At 90 % sparsity, chosen at random, a kept entry takes 1 byte, and a
granule 2 more for the size of its codes: 1.005 bytes per kept entry. `compact_index.py` has a
shorter form for rest and wire.

A mask has exactly one encoding, so equal bytes and equal masks are the same.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from penstock.errors import CorruptionError
from penstock.kernels.arguments import require_flat
from penstock.kernels.blocks import GRANULE
from penstock.kernels.compilation import serial_kernel
from penstock.kernels.gap_codes import ESCAPE, put_gap

_GRANULE_ESCAPES = (GRANULE - 1) // ESCAPE
_BEYOND, _ESCAPE_LAST = 1, 2  # what can be wrong within a granule


@serial_kernel
def _encode_positions(positions, begin, elements, codes, sizes):
    """Return the bytes written, or -1 - i if position i is not above its predecessor or is
    outside."""
    at = 0
    granule = 0
    start = 0  # of the codes of this granule
    last = -1
    for i in range(positions.size):
        position = positions[i] - begin
        if position <= last or position >= elements:
            return -1 - i
        while position >= (granule + 1) * GRANULE:
            sizes[granule] = at - start
            start = at
            granule += 1
            last = granule * GRANULE - 1
        at = put_gap(codes, at, position - last - 1)
        last = position
    for rest in range(granule, sizes.size):
        sizes[rest] = at - start
        start = at
    return at


@serial_kernel
def _encode_mask(mask, codes, sizes):
    at = 0
    for granule in range(sizes.size):
        start = at
        last = granule * GRANULE - 1
        for position in range(granule * GRANULE, min((granule + 1) * GRANULE, mask.size)):
            if mask[position]:
                at = put_gap(codes, at, position - last - 1)
                last = position
        sizes[granule] = at - start
    return at


@serial_kernel
def _count_entries(codes, code_offsets, elements, entry_offsets):
    """Count the entries of every granule; return its number and what is wrong, or (-1, 0)."""
    entries = 0
    entry_offsets[0] = 0
    for granule in range(code_offsets.size - 1):
        length = min(GRANULE, elements - granule * GRANULE)
        end = code_offsets[granule + 1]
        position = -1
        code = np.int64(0)
        for i in range(code_offsets[granule], end):
            code = np.int64(codes[i])
            kept = code != ESCAPE
            position += code + kept
            entries += kept
        if code == ESCAPE:
            return granule, _ESCAPE_LAST
        if position >= length:
            return granule, _BEYOND
        entry_offsets[granule + 1] = entries
    return -1, 0


@serial_kernel
def _decode(codes, code_offsets, begin, positions):
    # An escape is written too, and overwritten by the entry that follows in the same granule.
    entry = 0
    for granule in range(code_offsets.size - 1):
        position = begin + granule * GRANULE - 1
        for i in range(code_offsets[granule], code_offsets[granule + 1]):
            code = np.int64(codes[i])
            kept = code != ESCAPE
            position += code + kept
            positions[entry] = position
            entry += kept


@serial_kernel
def _decode_rows(codes, code_offsets, width, row_starts, columns):
    entry = 0
    row = 0
    row_end = width
    row_starts[0] = 0
    for granule in range(code_offsets.size - 1):
        position = granule * GRANULE - 1
        for i in range(code_offsets[granule], code_offsets[granule + 1]):
            code = np.int64(codes[i])
            kept = code != ESCAPE
            position += code + kept
            while position >= row_end:
                row += 1
                row_starts[row] = entry
                row_end += width
            columns[entry] = position - (row_end - width)
            entry += kept
    for rest in range(row + 1, row_starts.size):
        row_starts[rest] = entry


def granule_count(elements: int) -> int:
    """Return the number of granules of a mask over `elements` elements."""
    return -(-elements // GRANULE)


def max_code_bytes(kept: int, elements: int) -> int:
    """Return the greatest number of bytes that the codes of such a mask can take; some mask takes
    it.

    Raises:
        ValueError: `kept` is not from 0 to `elements`.
    """
    if not 0 <= kept <= elements:
        raise ValueError(f"kept entries: expected 0 to {elements}, got {kept}")
    # Of m elements with k kept, 1 or more, at most (m - k) // 255 codes are escapes: in a whole
    # granule 16 for up to 16 entries, and one less for every further 255 entries.
    whole, rest = divmod(elements, GRANULE)
    if kept <= whole:
        return kept + kept * _GRANULE_ESCAPES
    rest_escapes = max(rest - 1, 0) // ESCAPE
    most = whole * _GRANULE_ESCAPES + rest_escapes
    capacity = elements - most * ESCAPE
    return kept + most - max(0, -(-(kept - capacity) // ESCAPE))


def max_bytes(kept: int, elements: int) -> int:
    """Return the greatest number of bytes that a packed index can take (`PackedIndex.nbytes`).

    Raises:
        ValueError: `kept` is not from 0 to `elements`.
    """
    return 2 * granule_count(elements) + max_code_bytes(kept, elements)


def expected_bytes(kept: int, elements: int) -> int:
    """Return the mean number of bytes of a packed index whose entries are kept at random.

    Below 95 % sparsity hardly any gap is long enough for an escape, and a mask of millions of
    entries takes this number of bytes to within some tens.

    Raises:
        ValueError: `kept` is not from 0 to `elements`.
    """
    if not 0 <= kept <= elements:
        raise ValueError(f"kept entries: expected 0 to {elements}, got {kept}")
    if not elements:
        return 0
    # A kept entry has its k-th escape where 255 k elements before it in the granule are absent.
    density, escapes = kept / elements, 0.0
    whole, rest = divmod(elements, GRANULE)
    for granules, length in ((whole, GRANULE), (1, rest)):
        for gap in range(ESCAPE, length, ESCAPE):
            escapes += granules * density * (length - gap) * (1 - density) ** gap
    return 2 * granule_count(elements) + kept + round(escapes)


@dataclass(frozen=True, eq=False)
class PackedIndex:
    """A mask over a weight, or over whole granules of a weight.

    Attributes:
        begin: dense position of the first element in the weight; a multiple of `GRANULE`.
        elements: number of dense elements.
        codes: uint8 `[code bytes]`, the gaps.
        code_sizes: uint16 `[granules]`, bytes of codes per granule.
        code_offsets: int64 `[granules + 1]`, where the codes of each granule begin.
        entry_offsets: int64 `[granules + 1]`, the number of kept entries before each granule.
    """

    begin: int
    elements: int
    codes: np.ndarray
    code_sizes: np.ndarray
    code_offsets: np.ndarray
    entry_offsets: np.ndarray

    @property
    def kept(self) -> int:
        """Number of kept entries."""
        return int(self.entry_offsets[-1])

    @property
    def absent(self) -> int:
        """Number of entries that do not exist."""
        return self.elements - self.kept

    @property
    def end(self) -> int:
        """Dense position after the last element."""
        return self.begin + self.elements

    @property
    def granules(self) -> int:
        """Number of granules."""
        return self.code_sizes.size

    @property
    def nbytes(self) -> int:
        """Length of `to_bytes`; offsets are computed again by the reader."""
        return self.codes.size + 2 * self.granules

    def same_mask(self, other: PackedIndex) -> bool:
        """Return whether both are the same mask over the same elements."""
        return (
            (self.begin, self.elements) == (other.begin, other.elements)
            and np.array_equal(self.code_sizes, other.code_sizes)
            and np.array_equal(self.codes, other.codes)
        )

    def positions(self) -> np.ndarray:
        """Return the dense positions of the kept entries: int64 `[kept]`, rising."""
        positions = np.empty(self.kept, np.int64)
        _decode(self.codes, self.code_offsets, self.begin, positions)
        return positions

    def mask(self) -> np.ndarray:
        """Return the mask as bool `[elements]`."""
        mask = np.zeros(self.elements, np.bool_)
        mask[self.positions() - self.begin] = True
        return mask

    def rows_and_columns(self, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the mask of a whole weight in compressed rows (CSR).

        Args:
            rows: first dimension of the weight.
            columns: product of the other dimensions.

        Returns:
            int64 `[rows + 1]`, the number of kept entries before each row, and int32 `[kept]`, the
            column of each kept entry.

        Raises:
            ValueError: this is part of a weight, or a weight of another size.
        """
        if self.begin != 0 or rows * columns != self.elements:
            raise ValueError(
                f"compressed rows: expected the mask of a whole weight of {rows} x {columns} "
                f"elements, got elements {self.begin} to {self.end}"
            )
        row_starts, found = np.empty(rows + 1, np.int64), np.empty(self.kept, np.int32)
        _decode_rows(self.codes, self.code_offsets, columns, row_starts, found)
        return row_starts, found

    def cut(self, begin: int, end: int) -> PackedIndex:
        """Return granules `begin` to `end` (counted from this index's first) as an index that
        shares the bytes.

        Raises:
            ValueError: the range is not within 0 to `granules`.
        """
        if not 0 <= begin <= end <= self.granules:
            raise ValueError(
                f"granules: expected a range within 0 to {self.granules}, got {begin} to {end}"
            )
        first, last = self.code_offsets[begin], self.code_offsets[end]
        dense_begin = min(begin * GRANULE, self.elements)
        return PackedIndex(
            self.begin + dense_begin,
            min(end * GRANULE, self.elements) - dense_begin,
            self.codes[first:last],
            self.code_sizes[begin:end],
            self.code_offsets[begin : end + 1] - first,
            self.entry_offsets[begin : end + 1] - self.entry_offsets[begin],
        )

    def to_bytes(self) -> bytes:
        """Return the index as bytes: the sizes of the granules' codes (2 bytes each,
        little-endian), then the codes."""
        return self.code_sizes.astype("<u2").tobytes() + self.codes.tobytes()


def index_of_positions(positions: np.ndarray, elements: int, begin: int = 0) -> PackedIndex:
    """Encode a mask.

    Args:
        positions: int64 `[kept]`, dense positions of the kept entries, rising.
        elements: number of dense elements.
        begin: dense position of the first element, a multiple of `GRANULE`.

    Raises:
        ValueError: the positions do not rise, or one is outside `begin` to `begin + elements`.
    """
    require_flat("positions", positions, positions.size, np.int64)
    _require_place(begin, elements)
    if positions.size > elements:
        raise ValueError(f"positions: expected at most {elements}, got {positions.size}")
    codes = np.empty(max_code_bytes(positions.size, elements), np.uint8)
    sizes = np.zeros(granule_count(elements), np.uint16)
    written = _encode_positions(positions, begin, elements, codes, sizes)
    if written < 0:
        at = -1 - written
        before = f" after {positions[at - 1]}" if at else ""
        raise ValueError(
            f"positions: expected rising ones from {begin} to {begin + elements - 1}, got "
            f"{positions[at]}{before}"
        )
    return index_of_codes(codes[:written].copy(), sizes, elements, begin)


def index_of_mask(mask: np.ndarray, begin: int = 0) -> PackedIndex:
    """Encode a mask given as bool `[elements]`, whose first element has the dense position
    `begin`.

    Raises:
        ValueError: the mask has another type or layout, or `begin` is no multiple of `GRANULE`.
    """
    require_flat("mask", mask, mask.size, np.bool_)
    _require_place(begin, mask.size)
    codes = np.empty(max_code_bytes(int(np.count_nonzero(mask)), mask.size), np.uint8)
    sizes = np.zeros(granule_count(mask.size), np.uint16)
    written = _encode_mask(mask, codes, sizes)
    return index_of_codes(codes[:written].copy(), sizes, mask.size, begin)


def full_index(elements: int, begin: int = 0) -> PackedIndex:
    """Return the mask that keeps every element."""
    _require_place(begin, elements)
    sizes = np.full(granule_count(elements), GRANULE, np.uint16)
    if elements % GRANULE:
        sizes[-1] = elements % GRANULE
    return index_of_codes(np.zeros(elements, np.uint8), sizes, elements, begin)


def empty_index(elements: int, begin: int = 0) -> PackedIndex:
    """Return the mask that keeps nothing: where an initial mask starts from."""
    _require_place(begin, elements)
    sizes = np.zeros(granule_count(elements), np.uint16)
    return index_of_codes(np.empty(0, np.uint8), sizes, elements, begin)


def index_of_codes(
    codes: np.ndarray, code_sizes: np.ndarray, elements: int, begin: int = 0
) -> PackedIndex:
    """Return the index with these codes, after checking every one of them.

    Raises:
        CorruptionError: the codes are not those of a mask over `elements` elements.
    """
    _require_place(begin, elements)
    if code_sizes.size != granule_count(elements):
        raise CorruptionError(
            f"packed index: {elements} elements have {granule_count(elements)} granules, got the "
            f"sizes of {code_sizes.size}; {_ADVICE}"
        )
    code_offsets = np.zeros(code_sizes.size + 1, np.int64)
    np.cumsum(code_sizes, out=code_offsets[1:])
    if code_offsets[-1] != codes.size:
        raise CorruptionError(
            f"packed index: the sizes of the granules add up to {code_offsets[-1]} bytes of codes, "
            f"got {codes.size}; {_ADVICE}"
        )
    entry_offsets = np.zeros(code_sizes.size + 1, np.int64)
    granule, fault = _count_entries(codes, code_offsets, elements, entry_offsets)
    if fault:
        first = begin + granule * GRANULE
        last = min(first + GRANULE, begin + elements) - 1
        what = {
            _BEYOND: "hold an entry beyond the last",
            _ESCAPE_LAST: "end in an escape, and no entry follows",
        }[fault]
        raise CorruptionError(
            f"packed index: the codes of elements {first} to {last} {what}; {_ADVICE}"
        )
    return PackedIndex(begin, elements, codes, code_sizes, code_offsets, entry_offsets)


def index_from_bytes(
    data: bytes | memoryview, elements: int, kept: int, begin: int = 0
) -> PackedIndex:
    """Decode `PackedIndex.to_bytes` from an untrusted source.

    Args:
        data: exactly the bytes of the index.
        elements: number of dense elements that the mask must be over.
        kept: number of kept entries that it must have.
        begin: dense position of the first element.

    Raises:
        CorruptionError: the bytes are not those of such a mask.
    """
    table = 2 * granule_count(elements)
    if len(data) < table:
        raise CorruptionError(
            f"packed index: expected at least {table} bytes for the sizes of "
            f"{granule_count(elements)} granules, got {len(data)}; {_ADVICE}"
        )
    sizes = np.frombuffer(data, "<u2", granule_count(elements)).astype(np.uint16)
    codes = np.frombuffer(data, np.uint8, offset=table).copy()
    index = index_of_codes(codes, sizes, elements, begin)
    if index.kept != kept:
        raise CorruptionError(
            f"packed index: expected {kept} kept entries, got {index.kept}; {_ADVICE}"
        )
    return index


def joined(parts: list[PackedIndex]) -> PackedIndex:
    """Return the index of adjacent parts, in their order.

    Raises:
        ValueError: there is no part, or a part does not begin where the one before it ends.
    """
    if not parts:
        raise ValueError("parts of a packed index: expected at least one, got none")
    for before, after in itertools.pairwise(parts):
        if after.begin != before.end or (after.elements and before.elements % GRANULE):
            raise ValueError(
                f"parts of a packed index: expected one that begins at {before.end}, at the end of "
                f"a granule, got one that begins at {after.begin}"
            )
    return index_of_codes(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.code_sizes for part in parts]),
        sum(part.elements for part in parts),
        parts[0].begin,
    )


_ADVICE = "the bytes are corrupt: read them again, or resume from an earlier checkpoint"


def _require_place(begin: int, elements: int) -> None:
    if begin < 0 or (begin % GRANULE and elements):  # an empty part may begin at the weight's end
        raise ValueError(f"begin: expected a multiple of {GRANULE}, got {begin}")
    if elements < 0:
        raise ValueError(f"elements: expected 0 or more, got {elements}")
