"""A transposed copy of a float32 matrix.

Squares are transposed in registers, within blocks whose lines of source and target stay in a cache.
PyTorch's copy of a transposed view takes more than twice as long (`benchmarks/dense_products.py`).
"""

import numpy as np
from numba import prange

from penstock.kernels.arguments import flat_rows, require_flat, require_rows
from penstock.kernels.compilation import kernel
from penstock.kernels.transposition import transpose_floats
from penstock.kernels.vectors import LANES

_BLOCK_COLUMNS = 64  # of the source, a unit of work
_BLOCK_ROWS = 256


@kernel
def _transpose(source, stride, rows, columns, target):
    squares = rows // LANES * LANES
    for block in prange((columns + _BLOCK_COLUMNS - 1) // _BLOCK_COLUMNS):
        first = np.int64(block) * _BLOCK_COLUMNS
        end = min(first + _BLOCK_COLUMNS, columns)
        whole = first + (end - first) // LANES * LANES
        for low in range(0, squares, _BLOCK_ROWS):
            for column in range(first, whole, LANES):
                for row in range(low, min(low + _BLOCK_ROWS, squares), LANES):
                    place = row * stride + column
                    transpose_floats(source, place, stride, target, column * rows + row, rows)
        for column in range(first, end):
            for row in range(squares if column < whole else 0, rows):
                target[column * rows + row] = source[row * stride + column]


def copy_transposed(source: np.ndarray, target: np.ndarray) -> None:
    """Write the transposed matrix.

    Args:
        source: float32 `[rows, columns]`; rows are contiguous and may be apart.
        target: float32 `[columns * rows]`.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    require_rows("source", source, np.float32)
    require_flat("target", target, source.size, np.float32, write=True)
    flat, stride = flat_rows(source)
    _transpose(flat, stride, *source.shape, target)
