"""Ages in few bytes give the corrections of a step count per entry."""

import numpy as np
import pytest
from random_masks import random_mask

from penstock.sparsity import (
    MaskChange,
    Order,
    age_type,
    apply_change,
    correction_ends,
    index_of_mask,
    select,
    select_absent,
    updates_by_age,
)


def at_start(kept, dtype):
    """The ages of entries of which none was regrown."""
    return np.full(kept, np.iinfo(dtype).max, dtype)


def updates(ages, step, changes):
    """The number of updates of every entry after a step, as an optimizer looks it up."""
    by_age = updates_by_age(step, changes, ages.dtype.type)
    return by_age[np.minimum(ages, min(np.iinfo(ages.dtype).max, len(changes)))]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("seed", range(2))
def test_ages_are_those_of_a_step_count_per_entry(dtype, seed):
    generator = np.random.default_rng(seed)
    index = index_of_mask(random_mask("half", 3000, generator))
    born = dict.fromkeys(index.positions().tolist(), 0)
    ages = at_start(index.kept, dtype)
    steps: list[int] = []
    for step in np.cumsum(generator.integers(1, 9, 20)).tolist():
        drop = select(Order.RANDOM, step, 300, index, None)
        grow = select_absent(Order.RANDOM, step + 1, 300, index)
        remap = apply_change(MaskChange("w", index.kept, drop, grow), index)
        ages, index = remap.move_and_count(ages, 1), remap.index
        steps.append(step)
        born = {position: born.get(position, step) for position in index.positions().tolist()}
        for now in (step + 1, step + 7):
            expected = [now - born[position] for position in index.positions().tolist()]
            assert updates(ages, now, steps).tolist() == expected, (seed, step)


def test_an_age_stops_at_the_greatest_number_and_counts_from_the_start():
    index = index_of_mask(np.array([True, True, False, False]))
    drop = select(Order.RANDOM, 0, 1, index, None)
    grow = select_absent(Order.RANDOM, 0, 1, index)
    first = apply_change(MaskChange("w", 2, drop, grow), index)
    ages = first.move_and_count(at_start(2, np.uint8), 1)
    is_grown = first.source < 0
    unchanged = MaskChange("w", 2, select(Order.RANDOM, 0, 0, index, None), drop_nothing())
    remap = apply_change(unchanged, first.index)
    steps = [10]
    for change in range(1, 300):
        ages = remap.move_and_count(ages, 1)
        steps.append(10 + change)
        expected = 1000 if change >= 255 else 990
        assert updates(ages, 1000, steps)[is_grown].tolist() == [expected], change
        assert updates(ages, 1000, steps)[~is_grown].tolist() == [1000], change


def drop_nothing():
    return select(Order.RANDOM, 0, 0, index_of_mask(np.ones(1, np.bool_)), None)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95, 0.99, 0.999])
def test_bias_correction_ends_where_it_is_one_in_float64(beta):
    ends = correction_ends([beta])
    assert all(1 - beta**n == 1 for n in range(ends, ends + 1000))
    assert ends == 1 or 1 - beta ** (ends - 100 if ends > 100 else 1) != 1


@pytest.mark.parametrize(
    ("betas", "every", "expected"),
    [
        ((0.9, 0.95), 100, np.uint8),
        ((0.9, 0.95), 1, np.uint16),
        ((0.9, 0.999), 100, np.uint16),
        ((0.9, 0.999), 200, np.uint8),
        ((0.9, 0.99999), 1, np.uint32),
        ((0.0, 0.0), 1, np.uint8),
    ],
)
def test_the_type_of_ages_is_the_smallest_that_is_exact(betas, every, expected):
    assert age_type(betas, every) is expected


def test_betas_and_distances_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"betas: expected numbers from 0 to below 1, got \[1.0\]"):
        correction_ends([1.0])
    with pytest.raises(ValueError, match="steps between changes: expected 1 or more, got 0"):
        age_type((0.9, 0.95), 0)
