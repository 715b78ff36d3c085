"""Transposed copies of matrices, of sizes that squares of 16 and blocks divide or not."""

import numba
import numpy as np
import pytest

from penstock.kernels.transposed_copy import copy_transposed

SHAPES = [(1, 1), (1, 33), (33, 1), (16, 32), (5, 70), (70, 5), (257, 65), (300, 130), (512, 192)]


def numbers(shape, dtype, seed=0):
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 1 << 8 * np.dtype(dtype).itemsize, shape, dtype=np.uint32)
    return bits.astype(f"uint{8 * np.dtype(dtype).itemsize}").view(dtype)


def bits(array):
    return array.view(f"uint{8 * array.itemsize}")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("apart", [0, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copy_is_the_transposed_matrix_bit_by_bit(shape, dtype, apart, threads):
    """Every pattern, NaN included, and rows that are apart."""
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    rows, columns = shape
    source = numbers((rows, columns + apart), dtype)[:, :columns]
    guarded = np.full(source.size + 32, 7, dtype)
    copy_transposed(source, guarded[16:-16])
    found = guarded[16:-16].reshape(columns, rows)
    assert np.array_equal(bits(found), bits(np.ascontiguousarray(source.T)))
    assert (guarded[:16] == 7).all()
    assert (guarded[-16:] == 7).all()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (np.zeros((2, 3)), np.zeros(6), "source: expected uint16 in two dimensions, got float64"),
        (np.zeros(6, np.float32), np.zeros(6, np.float32), "source: expected float32 in two dim"),
        (np.zeros((3, 2), np.float32).T, np.zeros(6, np.float32), "source: expected contiguous"),
        (np.zeros((2, 3), np.float32), np.zeros(5, np.float32), r"target: expected shape \[6\]"),
        (np.zeros((2, 3), np.float32), np.zeros(6, np.uint16), "target: expected float32"),
    ],
)
def test_other_arrays_are_refused(source, target, message):
    with pytest.raises(ValueError, match=message):
        copy_transposed(source, target)
