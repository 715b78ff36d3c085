"""A gradient enters the store as PyTorch would round it, with its exact sum of squares."""

import math

import numba
import numpy as np
import pytest
import torch

from penstock.kernels.blocks import BLOCK_LENGTH, GRANULE
from penstock.kernels.gradients import add_gradient, copy_gradient, sums_of_squares
from penstock.kernels.moments import GROUP

LENGTHS = [*range(41), 63, 64, 65, 65535, 65536, 65537, 200001]


def random_gradient(length: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    scale = 10.0 ** generator.uniform(-6, 2, length)
    return (generator.standard_normal(length) * scale).astype(np.float32)


def torch_bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def value_of(patterns: np.ndarray) -> np.ndarray:
    return (patterns.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("length", LENGTHS)
def test_float32_is_copied_and_added(length):
    first, second = random_gradient(length, 1), random_gradient(length, 2)
    slab = np.empty(length, np.float32)
    total = copy_gradient(first, slab)
    np.testing.assert_array_equal(slab, first)
    assert math.fsum(total) == pytest.approx(math.fsum(first.astype(np.float64) ** 2), rel=1e-14)
    total = add_gradient(second, slab)
    np.testing.assert_array_equal(slab, first + second)
    assert math.fsum(total) == pytest.approx(
        math.fsum((first + second).astype(np.float64) ** 2), rel=1e-14
    )
    assert sums_of_squares(slab).tolist() == total.tolist()


@pytest.mark.parametrize("length", LENGTHS)
def test_bfloat16_is_rounded_as_pytorch_rounds(length):
    first, second = random_gradient(length, 3), random_gradient(length, 4)
    slab = np.empty(length, np.uint16)
    total = copy_gradient(first, slab)
    np.testing.assert_array_equal(slab, torch_bfloat16(first))
    kept = value_of(slab)
    assert math.fsum(total) == pytest.approx(math.fsum(kept.astype(np.float64) ** 2), rel=1e-14)
    add_gradient(second, slab)
    np.testing.assert_array_equal(slab, torch_bfloat16(kept + second))


def test_rounding_is_correct_for_every_low_half_and_non_finite_values():
    low = np.arange(65536, dtype=np.uint32)
    for high in (0x0000, 0x8000, 0x0001, 0x3F80, 0x3F81, 0xBF80, 0x7F7F, 0x7F80, 0x7FC0, 0xFFFF):
        values = ((np.uint32(high) << 16) | low).view(np.float32)
        slab = np.empty(values.size, np.uint16)
        copy_gradient(values, slab)
        expected = torch_bfloat16(values)
        nan = np.isnan(values)
        np.testing.assert_array_equal(slab[~nan], expected[~nan])
        assert np.isnan(value_of(slab[nan])).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 65535, 65536, 70000])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_one_bad_element_makes_the_sum_not_finite(bad, place, dtype):
    gradient = random_gradient(70001, 5)
    slab = np.zeros(gradient.size, dtype)
    assert np.isfinite(copy_gradient(gradient, slab)).all()
    gradient[place] = bad
    (granule,) = np.flatnonzero(~np.isfinite(copy_gradient(gradient, slab)))
    assert granule == place // GRANULE
    assert np.flatnonzero(~np.isfinite(sums_of_squares(slab))).tolist() == [granule]


def test_largest_floats_have_a_finite_sum():
    gradient = np.full(100000, np.finfo(np.float32).max)
    assert math.isfinite(math.fsum(copy_gradient(gradient, np.empty_like(gradient))))


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_the_number_of_threads_does_not_change_a_bit(dtype):
    gradient = random_gradient(1_000_003, 6)
    results = []
    for threads in (1, numba.config.NUMBA_NUM_THREADS):
        numba.set_num_threads(threads)
        slab = np.empty(gradient.size, dtype)
        results.append((copy_gradient(gradient, slab), add_gradient(gradient, slab), slab))
    for alone, together in zip(*results, strict=True):
        np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("seed", range(5))
def test_sums_of_pieces_equal_the_whole(seed, dtype):
    """Wherever a gradient is cut at a multiple of a granule."""
    length = int(np.random.default_rng(seed).integers(1, 200_000))
    gradient = random_gradient(length, seed)
    whole = np.empty(length, dtype)
    expected = copy_gradient(gradient, whole)
    places = np.arange(GRANULE, length, GRANULE)
    cuts = np.random.default_rng(seed).permutation(places)[:4]
    found = [
        copy_gradient(part, np.empty(part.size, dtype)) for part in np.split(gradient, sorted(cuts))
    ]
    np.testing.assert_array_equal(np.concatenate(found), expected)


def test_a_granule_holds_whole_groups_of_moments_and_fills_blocks():
    assert GRANULE % GROUP == 0
    assert BLOCK_LENGTH % GRANULE == 0


def test_a_slab_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"gradient slab: expected shape \[3\], got \[4\]"):
        copy_gradient(np.ones(3, np.float32), np.ones(4, np.float32))
