"""The product of a sparse matrix and the activations of one token: generation.

The matrix is read once, in the order of the store, and decides the time; nothing is gathered into
another order. By rows, every fourth entry of a row goes to one of four sums, which are then added
in one order. By columns, as for a weight with a row per input, each part of the rows adds to sums
of its own (`vector_products.py`).
"""

import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.compilation import kernel
from penstock.kernels.sparse_vectors import float_of
from penstock.kernels.vector_products import add_parts, parts_memory, rows_of_part

_BLOCK = 64  # rows of a unit of work
_COLUMNS = 1024  # whose sums are added at once


# Slices and unsigned places let LLVM drop the checks for negative indices.


@kernel
def _multiply(row_starts, columns, values, x, bias, out):
    rows = out.size
    for block in prange((rows + _BLOCK - 1) // _BLOCK):
        for row in range(block * _BLOCK, min((block + 1) * _BLOCK, rows)):
            places = columns[row_starts[row] : row_starts[row + 1]]
            factors = values[row_starts[row] : row_starts[row + 1]]
            whole = places.size // 4 * 4
            a = b = c = d = np.float32(0)
            for n in range(0, whole, 4):
                a += float_of(factors[n]) * x[np.uint32(places[n])]
                b += float_of(factors[n + 1]) * x[np.uint32(places[n + 1])]
                c += float_of(factors[n + 2]) * x[np.uint32(places[n + 2])]
                d += float_of(factors[n + 3]) * x[np.uint32(places[n + 3])]
            for n in range(whole, places.size):
                a += float_of(factors[n]) * x[np.uint32(places[n])]
            out[row] = ((a + b) + (c + d)) + bias[row]


@kernel
def _multiply_columns(row_starts, columns, values, x, bias, parts, part_rows, out):
    inner, width = x.size, out.size
    for part in prange((inner + part_rows - 1) // part_rows):
        sums = parts[part * width : (part + 1) * width]
        sums[:] = 0
        for row in range(part * part_rows, min((part + 1) * part_rows, inner)):
            places = columns[row_starts[row] : row_starts[row + 1]]
            factors = values[row_starts[row] : row_starts[row + 1]]
            number = x[row]
            for n in range(places.size):
                sums[np.uint32(places[n])] += float_of(factors[n]) * number
    for block in prange((width + _COLUMNS - 1) // _COLUMNS):
        add_parts(parts, bias, out, block * _COLUMNS, min((block + 1) * _COLUMNS, width))


def multiply_vector(
    row_starts: np.ndarray,
    columns: np.ndarray,
    values: np.ndarray,
    width: int,
    x: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    transposed: bool = False,
) -> np.ndarray:
    """Return `W x + bias`, float32 `[rows]`, or `x W + bias`, float32 `[width]`, if `transposed`.

    Args:
        row_starts: int64 `[rows + 1]`.
        columns: int32 `[entries]`, less than `width`.
        values: float32, or uint16 for bfloat16 patterns, `[entries]`.
        width: columns of the matrix.
        x: float32 `[width]`, or `[rows]` if `transposed`.
        bias: float32, of the result's length.
        transposed: whether the inputs are the rows of the matrix.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    rows = row_starts.size - 1
    inputs, outputs = (rows, width) if transposed else (width, rows)
    require_flat("row_starts", row_starts, rows + 1, np.int64)
    require_flat("columns", columns, columns.size, np.int32)
    require_flat("values", values, columns.size, np.float32, np.uint16)
    require_flat("x", x, inputs, np.float32)
    bias = np.zeros(outputs, np.float32) if bias is None else bias
    require_flat("bias", bias, outputs, np.float32)
    out = np.empty(outputs, np.float32)
    if transposed:
        parts = parts_memory(inputs, outputs)
        part_rows = rows_of_part(inputs)
        _multiply_columns(row_starts, columns, values, x, bias, parts, part_rows, out)
    else:
        _multiply(row_starts, columns, values, x, bias, out)
    return out
