"""A transposed copy of a matrix.

Squares are transposed in registers, within blocks whose lines of source and target stay in a cache.
PyTorch's copy of a transposed view takes three to five times as long (`docs/decisions.md`).
"""

import numpy as np
from numba import prange

from penstock.kernels.arguments import flat_rows, require_flat, require_rows
from penstock.kernels.compilation import inlined, kernel
from penstock.kernels.transposition import transpose_floats, transpose_to_features
from penstock.kernels.vectors import LANES

_BLOCK_COLUMNS = 64  # of the source, a unit of work
_BLOCK_ROWS = 256


@inlined
def _square_of_floats(source, at, stride, target, target_at, target_stride):
    transpose_floats(source, at, stride, target, target_at, target_stride)


@inlined
def _square_of_shorts(source, at, stride, target, target_at, target_stride):
    transpose_to_features(source, at, stride, target, target_at, target_stride)


@inlined
def _transpose_columns(square, size, source, stride, rows, first, end, target):
    """Transpose the columns from `first` to `end`; `size` is the number of columns of a square."""
    whole, squares = first + (end - first) // size * size, rows // LANES * LANES
    for low in range(0, squares, _BLOCK_ROWS):
        high = min(low + _BLOCK_ROWS, squares)
        for column in range(first, whole, size):
            for row in range(low, high, LANES):
                square(source, row * stride + column, stride, target, column * rows + row, rows)
    for column in range(first, end):
        for row in range(squares if column < whole else 0, rows):
            target[column * rows + row] = source[row * stride + column]


@kernel
def _transpose_floats(source, stride, rows, columns, target):
    for block in prange((columns + _BLOCK_COLUMNS - 1) // _BLOCK_COLUMNS):
        first = np.int64(block) * _BLOCK_COLUMNS
        end = min(first + _BLOCK_COLUMNS, columns)
        _transpose_columns(
            _square_of_floats, LANES, source, stride, rows, first, end, target
        )  # fmt: skip


@kernel
def _transpose_shorts(source, stride, rows, columns, target):
    for block in prange((columns + _BLOCK_COLUMNS - 1) // _BLOCK_COLUMNS):
        first = np.int64(block) * _BLOCK_COLUMNS
        end = min(first + _BLOCK_COLUMNS, columns)
        _transpose_columns(
            _square_of_shorts, 2 * LANES, source, stride, rows, first, end, target
        )  # fmt: skip


def copy_transposed(source: np.ndarray, target: np.ndarray) -> None:
    """Write the transposed matrix.

    Args:
        source: float32, or uint16 for bfloat16 patterns, `[rows, columns]`; rows are contiguous and
            may be apart.
        target: of the same type, `[columns * rows]`.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    is_float = source.dtype == np.float32
    require_rows("source", source, np.float32 if is_float else np.uint16)
    require_flat("target", target, source.size, source.dtype.type, write=True)
    rows, columns = source.shape
    flat, stride = flat_rows(source)
    transpose = _transpose_floats if is_float else _transpose_shorts
    transpose(flat, stride, rows, columns, target)
