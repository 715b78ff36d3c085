"""A gradient enters the store as PyTorch would round it, with its exact sum of squares."""

import math

import numba
import numpy as np
import pytest
import torch

from penstock.kernels.gradients import add_gradient, copy_gradient, sum_of_squares

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
    assert total == pytest.approx(math.fsum(first.astype(np.float64) ** 2), rel=1e-14)
    total = add_gradient(second, slab)
    np.testing.assert_array_equal(slab, first + second)
    assert total == pytest.approx(math.fsum((first + second).astype(np.float64) ** 2), rel=1e-14)
    assert sum_of_squares(slab) == total


@pytest.mark.parametrize("length", LENGTHS)
def test_bfloat16_is_rounded_as_pytorch_rounds(length):
    first, second = random_gradient(length, 3), random_gradient(length, 4)
    slab = np.empty(length, np.uint16)
    total = copy_gradient(first, slab)
    np.testing.assert_array_equal(slab, torch_bfloat16(first))
    kept = value_of(slab)
    assert total == pytest.approx(math.fsum(kept.astype(np.float64) ** 2), rel=1e-14)
    add_gradient(second, slab)
    np.testing.assert_array_equal(slab, torch_bfloat16(kept + second))


def test_rounding_of_every_low_half_and_of_what_is_not_finite():
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
    assert math.isfinite(copy_gradient(gradient, slab))
    gradient[place] = bad
    assert not math.isfinite(copy_gradient(gradient, slab))
    assert not math.isfinite(sum_of_squares(slab))


def test_the_greatest_floats_have_a_finite_sum():
    gradient = np.full(100000, np.finfo(np.float32).max)
    assert math.isfinite(copy_gradient(gradient, np.empty_like(gradient)))


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_the_number_of_threads_does_not_change_a_bit(dtype):
    gradient = random_gradient(1_000_003, 6)
    results = []
    for threads in (1, numba.config.NUMBA_NUM_THREADS):
        numba.set_num_threads(threads)
        slab = np.empty(gradient.size, dtype)
        results.append((copy_gradient(gradient, slab), add_gradient(gradient, slab), slab))
    assert results[0][:2] == results[1][:2]
    np.testing.assert_array_equal(results[0][2], results[1][2])


def test_a_slab_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"gradient slab: expected shape \[3\], got \[4\]"):
        copy_gradient(np.ones(3, np.float32), np.ones(4, np.float32))
