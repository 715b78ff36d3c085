"""A change of a mask against a plain dictionary of entries; the same for any division."""

import numpy as np
import pytest
from random_masks import KINDS, first_of, random_cut, random_mask

from penstock.errors import ConfigError, NonFiniteError
from penstock.sparsity import (
    MaskChange,
    Order,
    PackedIndex,
    apply_change,
    begin_selection,
    grown_entries,
    index_of_mask,
    joined,
    require_exact,
    select,
    select_absent,
    select_all,
)

NOTHING = begin_selection(Order.RANDOM, 0, 0)
TYPES = [np.float32, np.uint16, np.int8, np.uint8]


def random_change(
    index: PackedIndex, dense: np.ndarray, order: Order, generator: np.random.Generator
) -> MaskChange:
    """A change that drops by magnitude, and grows by magnitude or at random."""
    drop = int(generator.integers(0, index.kept + 1))
    grow = int(generator.integers(0, index.absent + 1))
    if index.kept - drop + grow == 0:
        drop, grow = (drop - 1, 0) if drop else (0, 1)
    return MaskChange(
        "w",
        index.kept,
        select(Order.SMALLEST, 5, drop, index, dense[index.positions()]),
        select_absent(order, 6, grow, index, dense),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [Order.LARGEST, Order.RANDOM])
@pytest.mark.parametrize("seed", range(3))
def test_entries_are_dropped_moved_and_grown_in_any_parts(kind, order, seed):
    generator = np.random.default_rng([seed, KINDS.index(kind), order is Order.RANDOM])
    length = int(generator.integers(1, 20_000))
    mask = random_mask(kind, length, generator)
    index = index_of_mask(mask)
    dense = np.round(generator.standard_normal(length), 1).astype(np.float32)
    change = random_change(index, dense, order, generator)
    cut = random_cut(length, generator)
    print(f"length {length}, drop {change.drop.count}, grow {change.grow.count}, parts {cut}")

    absent = np.flatnonzero(~mask)
    dropped = first_of(
        "smallest", 5, change.drop.count, index.positions(), dense[index.positions()]
    )
    grown = first_of(order.value, 6, change.grow.count, absent, dense[absent])
    after = mask.copy()
    after[dropped], after[grown] = False, True

    whole = apply_change(change, index, dense[mask], dense)
    np.testing.assert_array_equal(whole.index.mask(), after)
    assert whole.index.kept == change.kept_after
    require_exact(change, [whole])
    for dtype in TYPES:
        values = generator.integers(1, 100, index.kept).astype(dtype)
        entries = dict(zip(index.positions().tolist(), values.tolist(), strict=True))
        survivors = {p: v for p, v in entries.items() if after[p]}
        expected = [survivors.get(p, 0) for p in np.flatnonzero(after).tolist()]
        moved = whole.move(values)
        assert moved.dtype == dtype
        np.testing.assert_array_equal(moved, expected)

    parts = []
    for first, last in cut:
        part = index.cut(first, last)
        here = dense[part.begin : part.end]
        parts.append(apply_change(change, part, here[part.mask()], here))
    require_exact(change, parts)
    assert joined([p.index for p in parts if p.index.elements]).same_mask(whole.index)
    assert sum(p.grown for p in parts) == whole.grown


def test_moving_keeps_the_bits_of_every_value():
    index = index_of_mask(np.ones(6, np.bool_))
    values = np.array([-0.0, np.nan, np.inf, 1e-45, -3.0, 7.0], np.float32)
    magnitudes = np.array([1, 2, 3, 4, 5, 0], np.float32)
    drop = select(Order.SMALLEST, 1, 1, index, magnitudes)
    moved = apply_change(MaskChange("w", 6, drop, NOTHING), index, magnitudes).move(values)
    assert moved.tobytes() == values[:5].tobytes()


def test_bfloat16_gradients_select_as_their_float32_values():
    generator = np.random.default_rng(4)
    index = index_of_mask(generator.random(9000) < 0.1)
    patterns = (generator.standard_normal(9000).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    floats = (patterns.astype(np.uint32) << 16).view(np.float32)
    masks = []
    for gradient in (patterns, floats):
        grow = select_absent(Order.LARGEST, 9, 500, index, gradient)
        change = MaskChange("w", index.kept, NOTHING, grow)
        masks.append(apply_change(change, index, dense_gradient=gradient).index)
    assert masks[0].same_mask(masks[1])
    assert masks[0].kept == index.kept + 500


def test_lifting_a_mask_grows_every_entry():
    mask = random_mask("sparse", 9000, np.random.default_rng(1))
    index = index_of_mask(mask)
    change = MaskChange("w", index.kept, NOTHING, select_all(index.absent))
    remap = apply_change(change, index)
    assert remap.index.kept == 9000
    values = np.arange(1, index.kept + 1, dtype=np.float32)
    expected = np.zeros(9000, np.float32)
    expected[mask] = values
    np.testing.assert_array_equal(remap.move(values), expected)


def test_a_change_that_would_empty_a_weight_is_refused_with_its_name():
    index = index_of_mask(np.ones(10, np.bool_))
    drop = select(Order.SMALLEST, 1, 10, index, np.ones(10, np.float32))
    with pytest.raises(ConfigError) as caught:
        MaskChange("block.3.weight", 10, drop, NOTHING)
    assert str(caught.value) == (
        "sparsity: the mask of block.3.weight would keep no entry, expected at least 1; lower the "
        "sparsity, or leave this weight out of the sparse ones"
    )


def test_values_other_than_those_of_the_selections_are_found():
    generator = np.random.default_rng(8)
    index = index_of_mask(generator.random(9000) < 0.5)
    dense = generator.standard_normal(9000).astype(np.float32)
    kept = dense[index.mask()]
    drop = select(Order.SMALLEST, 1, 1000, index, kept)
    grow = select_absent(Order.LARGEST, 1, 1000, index, dense)
    change = MaskChange("w", index.kept, drop, NOTHING)
    other = apply_change(change, index, 2 * kept)
    with pytest.raises(ValueError, match=r"mask of w: expected 1000 dropped and 0 grown .*, got"):
        require_exact(change, [other])
    change = MaskChange("w", index.kept, NOTHING, grow)
    with pytest.raises(ValueError, match="mask of w: expected to grow at most 1000 entries"):
        apply_change(change, index, dense_gradient=8 * dense)
    dense[17] = np.nan
    with pytest.raises(NonFiniteError, match="1 of 9000 values are NaN"):
        apply_change(change, index, dense_gradient=dense)


def test_wrong_calls_are_refused():
    index = index_of_mask(np.ones(10, np.bool_))
    undecided = begin_selection(Order.SMALLEST, 1, 2)
    with pytest.raises(ValueError, match="mask of w: expected selections that are decided"):
        MaskChange("w", 10, undecided, NOTHING)
    with pytest.raises(ValueError, match="expected to drop at most 10 entries, got 11"):
        MaskChange("w", 10, select_all(11), NOTHING)
    remap = apply_change(MaskChange("w", 10, NOTHING, NOTHING), index)
    with pytest.raises(ValueError, match=r"values: expected shape \[10\], got \[9\]"):
        remap.move(np.zeros(9, np.float32))
    with pytest.raises(ValueError, match="values: expected 1, 2 or 4 bytes per entry, got float64"):
        remap.move(np.zeros(10, np.float64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_growth_without_the_dense_gradient_is_that_with_it(kind, seed):
    """In any parts: each keeps the entries that it will grow, and not the gradient."""
    generator = np.random.default_rng([seed, KINDS.index(kind), 2])
    length = int(generator.integers(1, 20_000))
    index = index_of_mask(random_mask(kind, length, generator))
    dense = np.round(generator.standard_normal(length), 1).astype(np.float32)
    change = random_change(index, dense, Order.LARGEST, generator)
    for first, last in [(0, index.granules), *random_cut(length, generator)]:
        part = index.cut(first, last)
        here = slice(part.begin, part.end)
        gradient, values = dense[here], dense[part.positions()]
        expected = apply_change(change, part, values, gradient)
        grown = grown_entries("w", change.grow, part, gradient)
        assert grown.kept == expected.grown
        found = apply_change(change, part, values, grown=grown)
        assert found.index.same_mask(expected.index)
        np.testing.assert_array_equal(found.source, expected.source)
        assert found.dropped == expected.dropped


def test_growth_of_entries_that_exist_is_refused():
    index = index_of_mask(np.array([True, False, True, False]))
    grow = select_absent(Order.RANDOM, 0, 1, index)
    with pytest.raises(ValueError, match="the values are not those of the selections"):
        apply_change(
            MaskChange("w", 2, NOTHING, grow),
            index,
            grown=index_of_mask(np.array([False, False, True, False])),
        )
