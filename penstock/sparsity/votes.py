"""Exact selection over all shards of a weight, from histograms: no value leaves its shard.

Entries are ordered by magnitude (the bits of a float32 without its sign order like its magnitude),
and entries of equal magnitude by a random key of their dense position, which no two positions share
(`kernels/position_keys.py`). The first `count` entries of this order are selected. They follow from
a radix search: the shards count the entries per value of 16 bits of the order, the counts are added
up, and the search goes on with the next 16 bits of the entries in the deciding bin. Two rounds
decide unless entries of equal magnitude are cut apart; these need one or two more.

Counts add up exactly, so neither the number of shards nor the division of a weight changes the
selection.
"""

from __future__ import annotations

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
    """The first `count` of a set of entries, as far as the votes have decided.

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
class Votes:
    """Entries per value of the next digit: uint16 `digits`, rising, and int64 `counts`."""

    digits: np.ndarray
    counts: np.ndarray


def selection_key(seed: int, weight: str, step: int, purpose: str) -> int:
    """Return the key of a selection: a digest of the run's seed, the weight's name, the step and
    what is selected."""
    text = f"{seed}/{weight}/{step}/{purpose}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def begin_selection(order: Order, key: int, count: int) -> Selection:
    """Return a selection of `count` entries before the first vote.

    Raises:
        ValueError: `count` is negative, or `key` is not from 0 to 2^64 - 1.
    """
    if count < 0:
        raise ValueError(f"entries to select: expected 0 or more, got {count}")
    key_words(key)
    # Without magnitudes all entries have the value 0, which the votes need not find out.
    digits = _VALUE_DIGITS if order is Order.RANDOM else 0
    return Selection(order, key, count, count, digits, 0, 0, count == 0)


def select_all(count: int) -> Selection:
    """Return the decided selection of all entries of a set, of which there are `count`."""
    return Selection(Order.RANDOM, 0, count, count, _VALUE_DIGITS, 0, _ALL_KEYS, True)


def added(votes: Sequence[Votes]) -> Votes:
    """Return the votes of all shards together."""
    total = np.zeros(_DIGIT + 1, np.int64)
    for each in votes:
        total[each.digits] += each.counts
    digits = np.flatnonzero(total)
    return Votes(digits.astype(np.uint16), total[digits])


def narrowed(selection: Selection, votes: Votes) -> Selection:
    """Return the selection after a round of votes, which are those of all shards.

    Raises:
        ValueError: the selection is decided, or the shards have fewer entries than it needs.
    """
    if selection.is_decided:
        raise ValueError("votes: the selection is decided, and needs none")
    up_to = np.cumsum(votes.counts)
    have = int(up_to[-1]) if up_to.size else 0
    if have < selection.remaining:
        raise ValueError(
            f"votes: expected at least {selection.remaining} entries to select from, got {have}"
        )
    at = int(np.searchsorted(up_to, selection.remaining))
    digit, in_bin = int(votes.digits[at]), int(votes.counts[at])
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

    Arguments and errors are those of `kept_votes` and `narrowed`.
    """
    selection = begin_selection(order, key, count)
    while not selection.is_decided:
        selection = narrowed(selection, kept_votes(selection, index, values))
    return selection


def select_absent(
    order: Order, key: int, count: int, index: PackedIndex, values: np.ndarray | None = None
) -> Selection:
    """Return the decided selection among the absent entries of a weight that is here as a whole.

    Arguments and errors are those of `absent_votes` and `narrowed`.
    """
    selection = begin_selection(order, key, count)
    while not selection.is_decided:
        selection = narrowed(selection, absent_votes(selection, index, values))
    return selection


def kept_votes(selection: Selection, index: PackedIndex, values: np.ndarray | None) -> Votes:
    """Return this part's votes on its kept entries.

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
    votes = np.zeros(_DIGIT + 1, np.int64)
    _vote_kept(
        patterns,
        flip_of(selection.order),
        index.codes,
        index.code_offsets,
        index.begin,
        _query(selection),
        votes,
    )
    return _packed(votes)


def absent_votes(selection: Selection, index: PackedIndex, values: np.ndarray | None) -> Votes:
    """Return this part's votes on its absent entries.

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
    votes = np.zeros(_DIGIT + 1, np.int64)
    _vote_absent(
        patterns,
        flip_of(selection.order),
        index.codes,
        index.code_offsets,
        index.begin,
        index.elements,
        _query(selection),
        votes,
    )
    return _packed(votes)


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
def _vote(value, position, query, votes):
    digits, shift, value_shift, found_value, key_shift, found_key, low, high = query
    if (value >> value_shift) != found_value:
        return
    if digits < _TWO:
        votes[np.int64((value >> shift) & _LAST_DIGIT)] += 1
        return
    key = position_key(position, low, high)
    if digits == _TWO or (key >> key_shift) == found_key:
        votes[np.int64((key >> shift) & _LAST_DIGIT)] += 1


@serial_kernel
def _vote_kept(patterns, flip, codes, code_offsets, begin, query, votes):
    entry = 0
    for granule in range(code_offsets.size - 1):
        position = begin + granule * GRANULE - 1
        for i in range(code_offsets[granule], code_offsets[granule + 1]):
            code = np.int64(codes[i])
            if code == ESCAPE:
                position += ESCAPE
                continue
            position += code + 1
            _vote(_rank_value(patterns, entry, flip), position, query, votes)
            entry += 1


@serial_kernel
def _vote_absent(patterns, flip, codes, code_offsets, begin, elements, query, votes):
    for granule in range(code_offsets.size - 1):
        i = granule * GRANULE
        for at in range(code_offsets[granule], code_offsets[granule + 1]):
            run_end = i + np.int64(codes[at])
            for absent in range(i, run_end):
                _vote(_rank_value(patterns, absent, flip), begin + absent, query, votes)
            i = run_end + (codes[at] != ESCAPE)
        for absent in range(i, min((granule + 1) * GRANULE, elements)):
            _vote(_rank_value(patterns, absent, flip), begin + absent, query, votes)


@serial_kernel
def _count_not_finite(patterns):
    found = 0
    shift = np.uint64(32 - 8 * patterns.itemsize)
    for i in range(patterns.size):
        if ((np.uint64(patterns[i]) << shift) & _MAGNITUDE) >= np.uint64(_INFINITY):
            found += 1
    return found


_NO_PATTERNS = np.empty(0, np.uint32)


def _packed(votes: np.ndarray) -> Votes:
    digits = np.flatnonzero(votes)
    return Votes(digits.astype(np.uint16), votes[digits])


def _query(selection: Selection) -> tuple[np.uint64, ...]:
    """What the kernels need to know of an undecided selection."""
    if selection.is_decided:
        raise ValueError("votes: the selection is decided, and needs none")
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
