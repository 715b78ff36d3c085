"""Radix selection over all shards of a weight, by histograms: exact, and no value leaves its shard.

Entries are ordered by magnitude (the bits of a float32 without its sign order like its magnitude),
and entries of equal magnitude by a random key of their dense position, which no two positions share
(`kernels/position_keys.py`). The first `count` entries of this order are selected. A selection is
narrowed in rounds. In a round, each shard counts its entries per value of the next 16-bit digit of
the order; the histograms of all shards are merged; the next round counts only the entries in the
bin that holds the last selected entry. Two rounds decide unless entries of equal magnitude are cut
apart; these need one or two more.

Counts add up exactly, so neither the number of shards nor the division of a weight changes the
selection.
"""

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import NonFiniteError
from penstock.kernels.arguments import require_flat
from penstock.kernels.blocks import GRANULE
from penstock.kernels.compilation import inlined, serial_kernel
from penstock.kernels.gap_codes import ESCAPE
from penstock.kernels.position_keys import key_words, position_key
from penstock.sparsity.packed_index import PackedIndex

_DIGIT_BITS, _DIGIT = 16, 0xFFFF
_VALUE_DIGITS, _KEY_DIGITS = 2, 4
_ALL_KEYS = 2**64 - 1
_MAGNITUDE = np.uint64(0x7FFFFFFF)
_INFINITY = 0x7F800000
_LAST_DIGIT = np.uint64(_DIGIT)
_TWO = np.uint64(_VALUE_DIGITS)


class Order(enum.Enum):
    """Which entries come first."""

    SMALLEST = "smallest"
    LARGEST = "largest"
    RANDOM = "random"


@dataclass(frozen=True)
class Selection:
    """The first `count` of a set of entries, as far as the rounds have decided.

    While it is not decided, `value` and `key_bits` are the `digits` leading digits of the entry at
    the end of the selection. Once it is, an entry is selected exactly if its rank (magnitude, then
    position key) is at most `(value, key_bits)`; if `count` is 0, no entry is.

    Attributes:
        order: which entries come first.
        key: 64-bit key of the position keys (`selection_key`).
        count: number of entries to select, over all shards.
        remaining: how many of them are within the deciding bin.
    """

    order: Order
    key: int
    count: int
    remaining: int
    digits: int
    value: int
    key_bits: int
    is_decided: bool


@dataclass(frozen=True, eq=False)
class Histogram:
    """Entries per value of the next digit: uint16 `digits`, rising, and int64 `counts`."""

    digits: np.ndarray
    counts: np.ndarray


def selection_key(seed: int, weight: str, step: int, purpose: str) -> int:
    """Return the key of a selection: a digest of the run's seed, the weight's name, the step and
    what is selected."""
    text = f"{seed}/{weight}/{step}/{purpose}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def begin_selection(order: Order, key: int, count: int) -> Selection:
    """Return a selection of `count` entries before the first round.

    Raises:
        ValueError: `count` is negative, or `key` is not from 0 to 2^64 - 1.
    """
    if count < 0:
        raise ValueError(f"entries to select: expected 0 or more, got {count}")
    key_words(key)
    # Without magnitudes all entries have the value 0, which no round needs to find out.
    digits = _VALUE_DIGITS if order is Order.RANDOM else 0
    return Selection(order, key, count, count, digits, 0, 0, count == 0)


def select_all(count: int) -> Selection:
    """Return the decided selection of all entries of a set, of which there are `count`."""
    return Selection(Order.RANDOM, 0, count, count, _VALUE_DIGITS, 0, _ALL_KEYS, True)


def merged_histogram(histograms: Sequence[Histogram]) -> Histogram:
    """Return the sum of histograms: that of all shards from those of each."""
    total = np.zeros(_DIGIT + 1, np.int64)
    for each in histograms:
        total[each.digits] += each.counts
    digits = np.flatnonzero(total)
    return Histogram(digits.astype(np.uint16), total[digits])


def narrowed(selection: Selection, histogram: Histogram) -> Selection:
    """Return the selection after a round, from the merged histogram of all shards.

    Raises:
        ValueError: the selection is decided, or the shards have fewer entries than it needs.
    """
    if selection.is_decided:
        raise ValueError("histogram: the selection is decided, and needs none")
    up_to = np.cumsum(histogram.counts)
    have = int(up_to[-1]) if up_to.size else 0
    if have < selection.remaining:
        raise ValueError(
            f"histogram: expected at least {selection.remaining} entries to select from, got {have}"
        )
    at = int(np.searchsorted(up_to, selection.remaining))
    digit, in_bin = int(histogram.digits[at]), int(histogram.counts[at])
    remaining = selection.remaining - (int(up_to[at]) - in_bin)
    value, key_bits = selection.value, selection.key_bits
    if selection.digits < _VALUE_DIGITS:
        value = value << _DIGIT_BITS | digit
    else:
        key_bits = key_bits << _DIGIT_BITS | digit
    deeper = replace(
        selection,
        remaining=remaining,
        digits=selection.digits + 1,
        value=value,
        key_bits=key_bits,
    )
    # No two entries have all digits in common, so the last round finds bins of one entry.
    return _decided(deeper) if in_bin == remaining else deeper


def select(order: Order, key: int, count: int, index: PackedIndex, values: np.ndarray) -> Selection:
    """Return the decided selection among the kept entries of a weight that is here as a whole.

    Arguments and errors are those of `kept_histogram` and `narrowed`.
    """
    selection = begin_selection(order, key, count)
    while not selection.is_decided:
        selection = narrowed(selection, kept_histogram(selection, index, values))
    return selection


def select_absent(
    order: Order, key: int, count: int, index: PackedIndex, values: np.ndarray | None = None
) -> Selection:
    """Return the decided selection among the absent entries of a weight that is here as a whole.

    Arguments and errors are those of `absent_histogram` and `narrowed`.
    """
    selection = begin_selection(order, key, count)
    while not selection.is_decided:
        selection = narrowed(selection, absent_histogram(selection, index, values))
    return selection


def kept_histogram(
    selection: Selection, index: PackedIndex, values: np.ndarray | None
) -> Histogram:
    """Return the histogram of a part's kept entries, over the next digit of a selection.

    Args:
        selection: the undecided selection.
        index: the mask of this part.
        values: float32 `[kept]`, or uint16 `[kept]` for bfloat16 patterns; not read (None) if the
            order is random.

    Raises:
        NonFiniteError: a value is NaN or infinite.
        ValueError: the values have another type or length.
    """
    patterns = patterns_of(selection.order, values, index.kept)
    counts = np.zeros(_DIGIT + 1, np.int64)
    _count_kept(
        patterns,
        flip_of(selection.order),
        index.codes,
        index.code_offsets,
        index.begin,
        _query(selection),
        counts,
    )
    return _packed(counts)


def absent_histogram(
    selection: Selection, index: PackedIndex, values: np.ndarray | None
) -> Histogram:
    """Return the histogram of a part's absent entries, over the next digit of a selection.

    Args:
        selection: the undecided selection.
        index: the mask of this part.
        values: float32 `[elements]`, or uint16 `[elements]` for bfloat16 patterns: one value per
            dense element; not read (None) if the order is random.

    Raises:
        NonFiniteError: a value is NaN or infinite.
        ValueError: the values have another type or length.
    """
    patterns = patterns_of(selection.order, values, index.elements)
    counts = np.zeros(_DIGIT + 1, np.int64)
    _count_absent(
        patterns,
        flip_of(selection.order),
        index.codes,
        index.code_offsets,
        index.begin,
        index.elements,
        _query(selection),
        counts,
    )
    return _packed(counts)


def patterns_of(order: Order, values: np.ndarray | None, length: int) -> np.ndarray:
    """Return the bit patterns by which entries are ordered: none in a random order.

    Raises:
        NonFiniteError: a value is NaN or infinite.
        ValueError: the values have another type or length.
    """
    if order is Order.RANDOM:
        return _NO_PATTERNS
    if values is None:
        raise ValueError(f"values: the order {order.value!r} needs them, got None")
    require_flat("values", values, length, np.float32, np.uint16)
    patterns = values.view(np.uint32) if values.dtype == np.float32 else values
    not_finite = _count_not_finite(patterns)
    if not_finite:
        raise NonFiniteError(
            f"{not_finite} of {length} values are NaN or infinite; entries of a mask are selected "
            "by finite values only: lower the learning rate, clip by a smaller norm, or look at "
            "the data"
        )
    return patterns


def flip_of(order: Order) -> np.uint64:
    """Return what the bits of a magnitude are combined with, so that the first rank is the
    lowest."""
    return _MAGNITUDE if order is Order.LARGEST else np.uint64(0)


@inlined
def _rank_value(patterns, i, flip):
    rank = np.uint64(0)
    if patterns.size:
        bits = np.uint64(patterns[i]) << np.uint64(32 - 8 * patterns.itemsize)
        rank = (bits & _MAGNITUDE) ^ flip
    return rank


@inlined
def _count(value, position, query, counts):
    digits, shift, value_shift, found_value, key_shift, found_key, low, high = query
    if (value >> value_shift) != found_value:
        return
    if digits < _TWO:
        counts[np.int64((value >> shift) & _LAST_DIGIT)] += 1
        return
    key = position_key(position, low, high)
    if digits == _TWO or (key >> key_shift) == found_key:
        counts[np.int64((key >> shift) & _LAST_DIGIT)] += 1


@serial_kernel
def _count_kept(patterns, flip, codes, code_offsets, begin, query, counts):
    entry = 0
    for granule in range(code_offsets.size - 1):
        position = begin + granule * GRANULE - 1
        for i in range(code_offsets[granule], code_offsets[granule + 1]):
            code = np.int64(codes[i])
            if code == ESCAPE:
                position += ESCAPE
                continue
            position += code + 1
            _count(_rank_value(patterns, entry, flip), position, query, counts)
            entry += 1


@serial_kernel
def _count_absent(patterns, flip, codes, code_offsets, begin, elements, query, counts):
    for granule in range(code_offsets.size - 1):
        i = granule * GRANULE
        for at in range(code_offsets[granule], code_offsets[granule + 1]):
            run_end = i + np.int64(codes[at])
            for absent in range(i, run_end):
                _count(_rank_value(patterns, absent, flip), begin + absent, query, counts)
            i = run_end + (codes[at] != ESCAPE)
        for absent in range(i, min((granule + 1) * GRANULE, elements)):
            _count(_rank_value(patterns, absent, flip), begin + absent, query, counts)


@serial_kernel
def _count_not_finite(patterns):
    found = 0
    shift = np.uint64(32 - 8 * patterns.itemsize)
    for i in range(patterns.size):
        if ((np.uint64(patterns[i]) << shift) & _MAGNITUDE) >= np.uint64(_INFINITY):
            found += 1
    return found


_NO_PATTERNS = np.empty(0, np.uint32)


def _packed(counts: np.ndarray) -> Histogram:
    digits = np.flatnonzero(counts)
    return Histogram(digits.astype(np.uint16), counts[digits])


def _query(selection: Selection) -> tuple[np.uint64, ...]:
    """What the kernels need to know of an undecided selection."""
    if selection.is_decided:
        raise ValueError("histogram: the selection is decided, and needs none")
    key_digits = max(0, selection.digits - _VALUE_DIGITS)
    value_digits = selection.digits - key_digits
    if key_digits or value_digits == _VALUE_DIGITS:
        shift = _DIGIT_BITS * (_KEY_DIGITS - 1 - key_digits)
    else:
        shift = _DIGIT_BITS * (_VALUE_DIGITS - 1 - value_digits)
    return (
        np.uint64(selection.digits),
        np.uint64(shift),
        np.uint64(_DIGIT_BITS * (_VALUE_DIGITS - value_digits)),
        np.uint64(selection.value),
        np.uint64(_DIGIT_BITS * (_KEY_DIGITS - key_digits) % 64),
        np.uint64(selection.key_bits),
        *key_words(selection.key),
    )


def _decided(selection: Selection) -> Selection:
    """The selection that takes the whole of its bin: the digits that are left are the last ones."""
    key_digits = max(0, selection.digits - _VALUE_DIGITS)
    value_left = _DIGIT_BITS * (_VALUE_DIGITS - (selection.digits - key_digits))
    key_left = _DIGIT_BITS * (_KEY_DIGITS - key_digits)
    return replace(
        selection,
        value=(selection.value + 1 << value_left) - 1,
        key_bits=(selection.key_bits + 1 << key_left) - 1,
        is_decided=True,
    )
