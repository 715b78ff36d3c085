"""A sum as a few numbers: exact, whatever the order and the grouping."""

import math
from fractions import Fraction

import numpy as np
import pytest

from penstock.kernels.exact_sum import exact_sum


def squares(length: int, seed: int) -> np.ndarray:
    """Squares of float32 numbers from the least to the greatest."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(length) * 2.0 ** generator.integers(-149, 125, length)) ** 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length", [0, 1, 2, 100, 3000])
def test_parts_add_up_exactly(length, seed):
    values = squares(length, seed)
    parts = exact_sum(values)
    assert sum(map(Fraction, parts)) == sum(map(Fraction, values.tolist()))
    assert math.fsum(parts) == math.fsum(values)


@pytest.mark.parametrize("seed", range(5))
def test_neither_order_nor_grouping_changes_a_bit(seed):
    values = squares(2000, seed)
    generator = np.random.default_rng(seed)
    shuffled = np.array_split(generator.permutation(values), generator.integers(1, 30))
    parts = [part for group in shuffled for part in exact_sum(group)]
    assert math.fsum(exact_sum(np.array(parts))) == math.fsum(values)


def test_small_numbers_are_not_lost_beside_a_large_one():
    values = np.array([2.0**250, *[2.0**-298] * 1024])
    assert exact_sum(values) == (2.0**-288, 2.0**250)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_stay_non_finite(bad):
    (part,) = exact_sum(np.array([1.0, bad, 2.0]))
    assert not math.isfinite(part)
