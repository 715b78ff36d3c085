"""Transposed copies of matrices, of sizes that squares of 16 and blocks divide or not."""

import numba
import numpy as np
import pytest

from penstock.kernels.transposed_copy import copy_transposed

SHAPES = [(1, 1), (1, 33), (33, 1), (16, 32), (5, 70), (70, 5), (257, 65), (300, 130), (512, 192)]


def patterns(shape, seed=0):
    """Every kind of number, NaN included."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("apart", [0, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copy_is_the_transposed_matrix_bit_by_bit(shape, apart, threads):
    """Also of rows that are apart; nothing beside the target is written."""
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    rows, columns = shape
    source = patterns((rows, columns + apart))[:, :columns]
    guarded = np.full(source.size + 32, 7, np.float32)
    copy_transposed(source, guarded[16:-16])
    found = guarded[16:-16].reshape(columns, rows)
    assert np.array_equal(found.view(np.uint32), source.T.copy().view(np.uint32))
    assert (guarded[:16] == 7).all()
    assert (guarded[-16:] == 7).all()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (np.zeros((2, 3)), np.zeros(6), "source: expected float32 in two dimensions, got float64"),
        (np.zeros(6, np.float32), np.zeros(6, np.float32), "source: expected float32 in two dim"),
        (np.zeros((3, 2), np.float32).T, np.zeros(6, np.float32), "source: expected contiguous"),
        (np.zeros((2, 3), np.float32), np.zeros(5, np.float32), r"target: expected shape \[6\]"),
        (np.zeros((2, 3), np.float32), np.zeros(6, np.uint16), "target: expected float32"),
    ],
)
def test_other_arrays_are_refused(source, target, message):
    with pytest.raises(ValueError, match=message):
        copy_transposed(source, target)
