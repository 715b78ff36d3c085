"""A change of a mask, as the commit decides it, and what becomes of values, moments and ages.

The decision names no entries: two selections (`radix_selection.py`) say which kept entries are
dropped and which absent ones are grown. Every shard applies them to its part of the mask in one
pass, and gets the new mask and, for every entry of it, where the entry was before. Each array of
the weight is then moved in one pass: dropped entries are gone, kept ones are moved, grown ones
begin at 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import ConfigError
from penstock.kernels.arguments import require_flat
from penstock.kernels.blocks import GRANULE
from penstock.kernels.compilation import inlined, serial_kernel
from penstock.kernels.gap_codes import ESCAPE, put_gap
from penstock.kernels.position_keys import key_words, position_key
from penstock.sparsity.packed_index import (
    PackedIndex,
    granule_count,
    index_of_codes,
    index_of_positions,
    max_code_bytes,
)
from penstock.sparsity.radix_selection import Order, Selection, flip_of, patterns_of

_MAGNITUDE = np.uint64(0x7FFFFFFF)
_ALL_KEYS = np.uint64(2**64 - 1)
_UNSIGNED: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True)
class MaskChange:
    """What happens to the mask of one weight at a commit.

    Attributes:
        weight: name of the weight.
        kept: number of kept entries before the change, over all shards.
        drop: decided selection among the kept entries.
        grow: decided selection among the absent entries.

    Raises:
        ConfigError: from the constructor, if no entry would be left.
        ValueError: from the constructor, if a selection is not decided or drops more than is kept.
    """

    weight: str
    kept: int
    drop: Selection
    grow: Selection

    def __post_init__(self) -> None:
        if not (self.drop.is_decided and self.grow.is_decided):
            raise ValueError(f"mask of {self.weight}: expected selections that are decided")
        if self.drop.count > self.kept:
            raise ValueError(
                f"mask of {self.weight}: expected to drop at most {self.kept} entries, got "
                f"{self.drop.count}"
            )
        require_not_empty(self.weight, self.kept_after)

    @property
    def kept_after(self) -> int:
        """Number of kept entries after the change, over all shards."""
        return self.kept - self.drop.count + self.grow.count


@dataclass(frozen=True, eq=False)
class Remap:
    """A part of a weight after a change of its mask.

    Attributes:
        index: the new mask of the part.
        source: int32 (int64 from 2^31 entries) `[kept]`, for every kept entry its number before the
            change, or -1 for a grown one.
        dropped: number of entries that this part has dropped.
    """

    index: PackedIndex
    source: np.ndarray
    dropped: int

    @property
    def grown(self) -> int:
        """Number of entries that this part has grown."""
        return int(np.count_nonzero(self.source < 0))

    def move(self, values: np.ndarray) -> np.ndarray:
        """Return one array of the weight in its new place: values, moments or gradients.

        Args:
            values: one number of 1, 2 or 4 bytes per entry of the old mask.

        Returns:
            The same type, one number per entry of the new mask: bit-identical for an entry that
            stays, and 0 for a grown one.

        Raises:
            ValueError: the array has another length or layout.
        """
        return self.move_and_count(values, 0)

    def move_and_count(self, values: np.ndarray, increment: int) -> np.ndarray:
        """Like `move`, with `increment` added to every entry that stays; the sum stops at the
        greatest number of the type (`update_counts.py`)."""
        require_flat("values", values, self._kept_before, values.dtype.type)
        if values.dtype.itemsize not in _UNSIGNED:
            raise ValueError(f"values: expected 1, 2 or 4 bytes per entry, got {values.dtype.name}")
        unsigned = _UNSIGNED[values.dtype.itemsize]
        moved = np.empty(self.source.size, values.dtype)
        top = np.uint64(np.iinfo(unsigned).max)
        _move(values.view(unsigned), self.source, moved.view(unsigned), np.uint64(increment), top)
        return moved

    @property
    def _kept_before(self) -> int:
        return self.source.size - self.grown + self.dropped


def require_not_empty(weight: str, kept: int) -> None:
    """Check that a mask keeps an entry.

    Raises:
        ConfigError: it keeps none.
    """
    if kept < 1:
        raise ConfigError(
            f"sparsity: the mask of {weight} would keep no entry, expected at least 1; lower the "
            "sparsity, or leave this weight out of the sparse ones"
        )


def apply_change(
    change: MaskChange,
    index: PackedIndex,
    magnitudes: np.ndarray | None = None,
    dense_gradient: np.ndarray | None = None,
    grown: PackedIndex | None = None,
) -> Remap:
    """Apply a change to a part of its weight.

    Args:
        change: the decision on the whole weight.
        index: the mask of this part.
        magnitudes: float32 `[kept]` or bfloat16 patterns: the values by which `drop` was selected;
            None if these are dropped in a random order.
        dense_gradient: float32 `[elements]` or bfloat16 patterns: those by which `grow` was
            selected; None if these are grown in a random order, or `grown` is given.
        grown: the entries of this part that `grow` selects, if they are known (`grown_entries`).

    Raises:
        NonFiniteError: a value is NaN or infinite.
        ValueError: an array has another type or length, or the values are not those of the
            selections.
    """
    drop_patterns, grow_patterns = _NO_PATTERNS, _NO_PATTERNS
    if change.drop.count:
        drop_patterns = patterns_of(change.drop.order, magnitudes, index.kept)
    if change.grow.count and grown is None:
        grow_patterns = patterns_of(change.grow.order, dense_gradient, index.elements)
    most = index.kept + min(change.grow.count, index.absent)
    source: np.ndarray = np.empty(most, np.int32 if index.kept < 2**31 else np.int64)
    codes = np.empty(max_code_bytes(most, index.elements), np.uint8)
    sizes = np.empty(granule_count(index.elements), np.uint16)
    mask = (index.codes, index.code_offsets, index.begin, index.elements)
    drop = (drop_patterns, change.drop.count > 0, _bounds(change.drop))
    if grown is None:
        grow = (grow_patterns, change.grow.count > 0, _bounds(change.grow))
        kept, written = _apply(*mask, *drop, *grow, codes, sizes, source)
    else:
        positions = grown.positions() - index.begin
        kept, written = _apply_grown(*mask, *drop, positions, codes, sizes, source)
    if kept < 0:
        raise ValueError(
            f"mask of {change.weight}: expected to grow at most {change.grow.count} entries, more "
            "are selected; the values are not those of the selections"
        )
    new = index_of_codes(codes[:written].copy(), sizes, index.elements, index.begin)
    source = source[:kept].copy()
    stayed = int(np.count_nonzero(source >= 0))
    return Remap(new, source, index.kept - stayed)


def grown_entries(
    weight: str, grow: Selection, index: PackedIndex, dense_gradient: np.ndarray
) -> PackedIndex:
    """Return the absent entries that a selection grows in a part of a weight, as a mask of them.

    With it, a change is applied without the dense gradient, which need not be held until then.

    Args:
        weight: its name.
        grow: decided selection among the absent entries.
        index: the mask of this part.
        dense_gradient: as for `apply_change`, whose errors are those of this function.
    """
    nothing = replace(grow, count=0)
    remap = apply_change(
        MaskChange(weight, max(1, index.kept), nothing, grow), index, None, dense_gradient
    )
    grown = remap.index.positions()[remap.source < 0]
    return index_of_positions(grown, index.elements, index.begin)


def require_exact(change: MaskChange, parts: Sequence[Remap]) -> None:
    """Check that all parts of a weight together have dropped and grown what was decided.

    Raises:
        ValueError: they have not.
    """
    dropped = sum(part.dropped for part in parts)
    grown = sum(part.grown for part in parts)
    if (dropped, grown) != (change.drop.count, change.grow.count):
        raise ValueError(
            f"mask of {change.weight}: expected {change.drop.count} dropped and "
            f"{change.grow.count} grown entries, got {dropped} and {grown}; the values are not "
            "those of the selections"
        )


# Arrays are kept out of functions with several returns, because Numba would count their references
# for every element.
@inlined
def _rank(patterns, i, bounds):
    rank = bounds[1]  # without patterns, the position keys alone decide
    if patterns.size:
        bits = np.uint64(patterns[i]) << np.uint64(32 - 8 * patterns.itemsize)
        rank = (bits & _MAGNITUDE) ^ bounds[0]
    return rank


@inlined
def _is_selected(rank, bounds, position):
    _, value, key_bits, low, high = bounds
    if rank != value:
        return rank < value
    return key_bits == _ALL_KEYS or position_key(position, low, high) <= key_bits


@serial_kernel
def _apply(
    codes,
    code_offsets,
    begin,
    elements,
    drop_patterns,
    drops,
    drop,
    grow_patterns,
    grows,
    grow,
    new_codes,
    new_sizes,
    source,
):
    """Return the numbers of kept entries and of bytes, or -1 if `source` is too short."""
    entry = 0
    kept = 0
    at = 0
    for granule in range(code_offsets.size - 1):
        start = at
        i = granule * GRANULE
        granule_end = min(i + GRANULE, elements)
        last = i - 1
        place = code_offsets[granule]
        while i < granule_end:
            # A run of absent entries, and then a kept one, an escape, or the granule's end.
            is_entry = False
            run_end = granule_end
            if place < code_offsets[granule + 1]:
                code = np.int64(codes[place])
                place += 1
                run_end = i + code
                is_entry = code != ESCAPE
            elif not grows:
                break
            if grows:
                for absent in range(i, run_end):
                    if _is_selected(_rank(grow_patterns, absent, grow), grow, begin + absent):
                        if kept == source.size:
                            return -1, at
                        at = put_gap(new_codes, at, absent - last - 1)
                        last = absent
                        source[kept] = -1
                        kept += 1
            i = run_end
            if is_entry:
                rank = _rank(drop_patterns, entry, drop) if drops else np.uint64(0)
                if not (drops and _is_selected(rank, drop, begin + i)):
                    if kept == source.size:
                        return -1, at
                    at = put_gap(new_codes, at, i - last - 1)
                    last = i
                    source[kept] = entry
                    kept += 1
                entry += 1
                i += 1
        new_sizes[granule] = at - start
    return kept, at


@serial_kernel
def _apply_grown(
    codes,
    code_offsets,
    begin,
    elements,
    drop_patterns,
    drops,
    drop,
    grown,
    new_codes,
    new_sizes,
    source,
):
    """Like `_apply`, for the grown positions, counted from `begin`; return -1 too if one of them is
    kept already."""
    entry = 0
    kept = 0
    at = 0
    following = 0
    for granule in range(code_offsets.size - 1):
        start = at
        last = np.int64(granule * GRANULE - 1)
        position = last
        end = code_offsets[granule + 1]
        for place in range(code_offsets[granule], end + 1):
            is_entry = place < end
            run_end = min((granule + 1) * GRANULE, elements)
            if is_entry:
                code = np.int64(codes[place])
                if code == ESCAPE:
                    position += ESCAPE
                    continue
                position += code + 1
                run_end = position
            while following < grown.size and grown[following] < run_end:
                if kept == source.size:
                    return -1, at
                at = put_gap(new_codes, at, grown[following] - last - 1)
                last = grown[following]
                source[kept] = -1
                kept += 1
                following += 1
            if is_entry:
                if following < grown.size and grown[following] == position:
                    return -1, at
                rank = _rank(drop_patterns, entry, drop) if drops else np.uint64(0)
                if not (drops and _is_selected(rank, drop, begin + position)):
                    if kept == source.size:
                        return -1, at
                    at = put_gap(new_codes, at, position - last - 1)
                    last = position
                    source[kept] = entry
                    kept += 1
                entry += 1
        new_sizes[granule] = at - start
    return kept, at


@serial_kernel
def _move(values, source, moved, increment, top):
    for i in range(source.size):
        before = source[i]
        if before < 0:
            moved[i] = 0
        else:
            value = np.uint64(values[before])
            moved[i] = value + min(increment, top - value)


_NO_PATTERNS = np.empty(0, np.uint32)


def _bounds(selection: Selection) -> tuple[np.uint64, ...]:
    """What the kernel compares ranks with."""
    flip = flip_of(selection.order if selection.count else Order.RANDOM)
    value, key_bits = np.uint64(selection.value), np.uint64(selection.key_bits)
    return flip, value, key_bits, *key_words(selection.key)
