"""The orders in which products go through a mask."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from sparse_masks import KINDS, layout_of, mask_of

from penstock.sparsity import SparseLayout


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_blocked_order_has_every_entry_once(kind, transposed):
    mask = mask_of(kind, (41, 67), 1)
    numbers = scipy.sparse.csr_array(mask.astype(np.int64))
    numbers.data[:] = np.arange(numbers.nnz)  # each entry is its place in the store
    wanted = (numbers.T if transposed else numbers).tocsr()
    rows, columns = wanted.shape
    for block_columns, band_rows in ((16, None), (100, None), (7, 10), (1, 1)):
        matrix = layout_of(mask).blocked(block_columns, band_rows, transposed=transposed)
        found = np.full((rows, columns), -1)
        for cell in range(matrix.bands * matrix.blocks):
            band, block = divmod(cell, matrix.blocks)
            counts = []
            for segment in range(matrix.cells[cell], matrix.cells[cell + 1]):
                row, entries = matrix.rows[segment], slice(*matrix.starts[segment : segment + 2])
                local = matrix.columns[entries].astype(int)
                assert (np.diff(local) > 0).all()
                assert band * matrix.band_rows <= row < (band + 1) * matrix.band_rows
                assert (local < block_columns).all()
                places = block * block_columns + local
                assert (found[row, places] == -1).all()
                found[row, places] = matrix.positions[entries]
                counts.append(local.size)
            assert counts == sorted(counts)
            if block in (0, matrix.blocks - 1):  # where sums start and end
                assert len(counts) == min(matrix.band_rows, rows - band * matrix.band_rows)
            else:
                assert 0 not in counts
        expected = np.full((rows, columns), -1)
        expected[(mask.T if transposed else mask)] = wanted.toarray()[
            mask.T if transposed else mask
        ]
        np.testing.assert_array_equal(found, expected)


def test_blocked_order_is_made_once():
    layout = layout_of(mask_of("random", (20, 20), 0))
    matrix = layout.blocked(16, None)
    assert layout.blocked(16, 20) is matrix
    assert layout.blocked(16, 1000) is matrix
    assert layout.blocked(8, None) is not matrix
    layout.forget_blocked()
    assert layout.blocked(16, None) is not matrix


def starts(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def columns(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize(
    ("row_starts", "indices", "shape", "message"),
    [
        (starts(0, 1), columns(0), (0, 3), r"at least one row and one column, got \[0, 3\]"),
        (starts(0, 1), columns(0), (2, 3), r"row_starts: expected shape \[3\], got \[2\]"),
        (starts(0, 2, 1), columns(0), (2, 3), r"row_starts: expected ascending numbers from 0"),
        (starts(0, 1, 1), columns(0, 1), (2, 3), r"from 0 to 2, the number of entries, got 0 to 1"),
        (starts(1, 1, 1), columns(0), (2, 3), r"row_starts: expected ascending .* got 1 to 1"),
        (starts(0, 0, 1), columns(3), (2, 3), r"from 0 to 2 in every row, got \[3\] in row 1"),
        (starts(0, 0, 1), columns(-1), (2, 3), r"from 0 to 2 in every row, got \[-1\] in row 1"),
        (starts(0, 2, 2), columns(1, 1), (2, 3), r"ascending .* got \[1, 1\] in row 0"),
        (starts(0, 2, 2), columns(2, 1), (2, 3), r"ascending .* got \[2, 1\] in row 0"),
        (starts(0, 1), np.zeros(1, np.int64), (1, 3), r"columns: expected int32, got int64"),
    ],
)
def test_arrays_that_are_not_a_mask_are_refused(row_starts, indices, shape, message):
    with pytest.raises(ValueError, match=message):
        SparseLayout.of(row_starts, indices, shape)
