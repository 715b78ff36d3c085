"""The product of a sparse matrix and the activations of one token: generation.

The matrix is read once, in the order of the store, and decides the time; nothing is gathered into
another order. The entries of a row are dealt out to four sums, which are then added in one order.
"""

import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.compilation import kernel
from penstock.kernels.sparse_vectors import float_of

_BLOCK = 64  # rows of a unit of work


@kernel
def _multiply(row_starts, columns, values, x, bias, out):
    rows = out.size
    for block in prange((rows + _BLOCK - 1) // _BLOCK):
        for row in range(block * _BLOCK, min((block + 1) * _BLOCK, rows)):
            begin, end = row_starts[row], row_starts[row + 1]
            whole = begin + (end - begin) // 4 * 4
            a = b = c = d = np.float32(0)
            for n in range(begin, whole, 4):
                a += float_of(values[n]) * x[columns[n]]
                b += float_of(values[n + 1]) * x[columns[n + 1]]
                c += float_of(values[n + 2]) * x[columns[n + 2]]
                d += float_of(values[n + 3]) * x[columns[n + 3]]
            for n in range(whole, end):
                a += float_of(values[n]) * x[columns[n]]
            out[row] = ((a + b) + (c + d)) + bias[row]


def multiply_vector(
    row_starts: np.ndarray,
    columns: np.ndarray,
    values: np.ndarray,
    width: int,
    x: np.ndarray,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """Return `W x + bias`, float32 `[rows]`.

    Args:
        row_starts: int64 `[rows + 1]`.
        columns: int32 `[entries]`, less than `width`.
        values: float32, or uint16 for bfloat16 patterns, `[entries]`.
        width: columns of the matrix.
        x: float32 `[width]`.
        bias: float32 `[rows]`.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    rows = row_starts.size - 1
    require_flat("row_starts", row_starts, rows + 1, np.int64)
    require_flat("columns", columns, columns.size, np.int32)
    require_flat("values", values, columns.size, np.float32, np.uint16)
    require_flat("x", x, width, np.float32)
    bias = np.zeros(rows, np.float32) if bias is None else bias
    require_flat("bias", bias, rows, np.float32)
    out = np.empty(rows, np.float32)
    _multiply(row_starts, columns, values, x, bias, out)
    return out
