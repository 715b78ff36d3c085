"""Selections by histograms are those of a full sort, however a weight is cut."""

import numpy as np
import pytest
from random_masks import KINDS, first_of, philox2x32, random_cut, random_mask

from penstock.errors import NonFiniteError
from penstock.sparsity import (
    Order,
    absent_histogram,
    begin_selection,
    index_of_mask,
    kept_histogram,
    merged_histogram,
    narrowed,
    select,
    select_absent,
    selection_key,
)

ORDERS = list(Order)
VALUES = ["normal", "equal", "rounded", "zeros", "subnormal", "bfloat16"]


def random_values(kind: str, length: int, generator: np.random.Generator) -> np.ndarray:
    """float32 values, or the uint16 patterns of bfloat16 ones."""
    values = generator.standard_normal(length).astype(np.float32)
    if kind == "equal":
        values = np.copysign(np.float32(0.37), values)
    elif kind == "rounded":
        values = np.round(values, 1)
    elif kind == "zeros":
        values[generator.random(length) < 0.8] = -0.0
    elif kind == "subnormal":
        values = values * np.float32(1e-40)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if kind == "bfloat16" else values


def as_floats(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def selected(selection, positions: np.ndarray, values: np.ndarray | None) -> np.ndarray:
    """The positions whose rank is within the selection's bounds, computed apart from the code."""
    ranks = np.zeros(positions.size, np.int64)
    if selection.order is not Order.RANDOM:
        ranks = np.abs(as_floats(values)).view(np.uint32).astype(np.int64)
        if selection.order is Order.LARGEST:
            ranks = 0x7FFFFFFF - ranks
    keys = philox2x32(positions, selection.key)
    within = (ranks == selection.value) & (keys <= np.uint64(selection.key_bits))
    return positions[(ranks < selection.value) | within]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("seed", range(3))
def test_histograms_of_any_parts_select_what_a_full_sort_does(order, kind, seed):
    generator = np.random.default_rng([seed, VALUES.index(kind), ORDERS.index(order)])
    length = int(generator.integers(1, 20_000))
    index = index_of_mask(random_mask(generator.choice(["sparse", "half"]), length, generator))
    is_growth = bool(generator.integers(2))
    positions = np.flatnonzero(~index.mask()) if is_growth else index.positions()
    dense = random_values(kind, length, generator)
    of_positions = dense[positions]
    count = int(generator.integers(0, positions.size + 1))
    key = selection_key(seed, "w", 3, "drop")

    cut = random_cut(length, generator)
    parts = [index.cut(first, last) for first, last in cut]
    selection = begin_selection(order, key, count)
    rounds = 0
    while not selection.is_decided:
        histograms = []
        for part in parts:
            here = dense[part.begin : part.end]
            if is_growth:
                histograms.append(absent_histogram(selection, part, here))
            else:
                histograms.append(kept_histogram(selection, part, here[part.mask()]))
        selection = narrowed(selection, merged_histogram(histograms))
        rounds += 1
    print(f"length {length}, count {count}, parts {cut}, rounds {rounds}")

    whole = select_absent if is_growth else select
    assert whole(order, key, count, index, dense if is_growth else of_positions) == selection
    expected = first_of(order.value, key, count, positions, as_floats(of_positions))
    got = selected(selection, positions, of_positions) if count else np.empty(0, np.int64)
    np.testing.assert_array_equal(got, expected)
    assert rounds <= 4


def test_histograms_add_up_in_any_grouping():
    generator = np.random.default_rng(1)
    index = index_of_mask(generator.random(30_000) < 0.2)
    values = generator.standard_normal(index.kept).astype(np.float32)
    selection = begin_selection(Order.SMALLEST, 1, 7)
    at = index.entry_offsets
    histograms = [
        kept_histogram(selection, index.cut(g, g + 1), values[at[g] : at[g + 1]])
        for g in range(index.granules)
    ]
    whole = kept_histogram(selection, index, values)
    for together in (
        merged_histogram(histograms),
        merged_histogram([merged_histogram(histograms[:3]), merged_histogram(histograms[3:])]),
        merged_histogram(histograms[::-1]),
    ):
        np.testing.assert_array_equal(together.digits, whole.digits)
        np.testing.assert_array_equal(together.counts, whole.counts)
    assert whole.counts.sum() == index.kept


def test_magnitudes_without_ties_at_the_border_are_decided_in_two_rounds():
    generator = np.random.default_rng(2)
    index = index_of_mask(np.ones(50_000, np.bool_))
    values = generator.standard_normal(50_000).astype(np.float32)
    selection = begin_selection(Order.SMALLEST, 1, 20_000)
    for _ in range(2):
        assert not selection.is_decided
        selection = narrowed(selection, kept_histogram(selection, index, values))
    assert selection.is_decided


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("histogram", [kept_histogram, absent_histogram])
def test_values_that_are_not_finite_are_refused(bad, histogram):
    index = index_of_mask(np.ones(5, np.bool_))
    values = np.array([1, 2, bad, 3, bad], np.float32)
    with pytest.raises(NonFiniteError, match="2 of 5 values are NaN or infinite"):
        histogram(begin_selection(Order.SMALLEST, 1, 2), index, values)
    patterns = (values.view(np.uint32) >> 16).astype(np.uint16)
    with pytest.raises(NonFiniteError, match="2 of 5 values are NaN or infinite"):
        histogram(begin_selection(Order.LARGEST, 1, 2), index, patterns)


def test_a_random_order_reads_no_values():
    index = index_of_mask(np.ones(5, np.bool_))
    nans = np.full(5, np.nan, np.float32)
    assert select(Order.RANDOM, 1, 2, index, nans) == select(Order.RANDOM, 1, 2, index, None)


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_there_are_cannot_be_selected(kind):
    index = index_of_mask(random_mask(kind, 5000, np.random.default_rng(3)))
    with pytest.raises(ValueError, match=f"at least {index.kept + 1} entries .*, got {index.kept}"):
        select(Order.SMALLEST, 1, index.kept + 1, index, np.ones(index.kept, np.float32))


def test_wrong_calls_are_refused():
    index = index_of_mask(np.ones(5, np.bool_))
    decided = begin_selection(Order.SMALLEST, 1, 0)
    with pytest.raises(ValueError, match="decided, and needs none"):
        kept_histogram(decided, index, np.ones(5, np.float32))
    with pytest.raises(ValueError, match="0 or more, got -1"):
        begin_selection(Order.SMALLEST, 1, -1)
    with pytest.raises(ValueError, match="the order 'largest' needs them, got None"):
        select(Order.LARGEST, 1, 1, index, None)
    with pytest.raises(ValueError, match="expected shape"):
        select(Order.LARGEST, 1, 1, index, np.ones(4, np.float32))


def test_keys_differ_by_each_of_their_parts():
    parts = [(0, "a", 1, "drop"), (1, "a", 1, "drop"), (0, "b", 1, "drop"), (0, "a", 2, "drop")]
    keys = {selection_key(*each) for each in [*parts, (0, "a", 1, "grow")]}
    assert len(keys) == 5
