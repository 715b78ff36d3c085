"""The product of a matrix and the activations of one token: generation.

Each number of the matrix is read once, and memory decides the time. Libraries of dense products are
made for many tokens (`benchmarks/generation.py` compares them).

A matrix by rows has a dot product per row. A matrix by columns, `[inner, columns]` in memory, is
read in the same order: each part of its rows adds to sums of its own, and the parts are then added
in their order. The order of every sum is the same for any number of threads.
"""

import threading

import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.compilation import inlined, kernel
from penstock.kernels.gradients import load_gradient
from penstock.kernels.vectors import (
    LANES,
    every_lane,
    first_lanes,
    fma,
    load,
    splat,
    store,
    sum_lanes,
    widened,
)

PARTS = 16
"""Parts of the rows of a matrix by columns, at most; so many threads can read such a matrix."""
_BLOCK = 64  # rows of a unit of work
_BLOCK_COLUMNS = 1024  # columns whose sums are added by a unit of work
_STRIDE = 4 * LANES
_MEMORY = threading.local()


def parts_memory(inner: int, columns: int) -> np.ndarray:
    """Return memory for the sums of the parts, float32 `[parts * columns]`, the same for all
    products of a thread."""
    count = columns * -(-inner // rows_of_part(inner))
    held: np.ndarray | None = getattr(_MEMORY, "parts", None)
    if held is None or held.size < count:
        held = _MEMORY.parts = np.empty(count, np.float32)
    return held[:count]


def rows_of_part(inner: int) -> int:
    """Return the rows of each part but the last."""
    return max(1, -(-inner // PARTS))


@inlined
def add_parts(parts, bias, out, first, last):
    """In a kernel: write the bias plus the sums of all parts, for columns from `first` on."""
    columns = out.size
    for column in range(first, last, LANES):
        lanes = first_lanes(min(LANES, last - column))
        total = load(bias, column, lanes)
        for at in range(column, parts.size, columns):
            total += load(parts, at, lanes)
        store(out, column, total, lanes)


@kernel
def _multiply_rows(matrix, x, bias, out):
    inner, zero = x.size, splat(np.float32(0))
    whole = inner // _STRIDE * _STRIDE
    for block in prange((out.size + _BLOCK - 1) // _BLOCK):
        for row in range(block * _BLOCK, min((block + 1) * _BLOCK, out.size)):
            at, every = row * inner, every_lane()
            a = b = c = d = zero
            for n in range(0, whole, _STRIDE):
                a = fma(load_gradient(matrix, at + n, every), load(x, n, every), a)
                n += LANES
                b = fma(load_gradient(matrix, at + n, every), load(x, n, every), b)
                n += LANES
                c = fma(load_gradient(matrix, at + n, every), load(x, n, every), c)
                n += LANES
                d = fma(load_gradient(matrix, at + n, every), load(x, n, every), d)
            for n in range(whole, inner, LANES):
                lanes = first_lanes(min(LANES, inner - n))
                a = fma(load_gradient(matrix, at + n, lanes), load(x, n, lanes), a)
            total = sum_lanes(widened((a + b) + (c + d)))
            out[row] = np.float32(total) + bias[row]


@inlined
def _add_four_rows(matrix, x, row, sums, columns, column, lanes):
    """Add four rows, times their inputs, to the sums of up to 16 columns."""
    at, total = row * columns + column, load(sums, column, lanes)
    total = fma(load_gradient(matrix, at, lanes), splat(x[row]), total)
    at += columns
    total = fma(load_gradient(matrix, at, lanes), splat(x[row + 1]), total)
    at += columns
    total = fma(load_gradient(matrix, at, lanes), splat(x[row + 2]), total)
    at += columns
    total = fma(load_gradient(matrix, at, lanes), splat(x[row + 3]), total)
    store(sums, column, total, lanes)


@inlined
def _add_row(matrix, x, row, sums, columns, column, lanes):
    numbers = load_gradient(matrix, row * columns + column, lanes)
    store(sums, column, fma(numbers, splat(x[row]), load(sums, column, lanes)), lanes)


@kernel
def _multiply_columns(matrix, x, bias, parts, part_rows, out):
    inner, columns = x.size, out.size
    whole, left = columns // LANES * LANES, first_lanes(columns % LANES)
    for part in prange((inner + part_rows - 1) // part_rows):
        sums = parts[part * columns : (part + 1) * columns]
        sums[:] = 0
        first, last = part * part_rows, min((part + 1) * part_rows, inner)
        fours = first + (last - first) // 4 * 4
        for row in range(first, fours, 4):
            for column in range(0, whole, LANES):
                _add_four_rows(matrix, x, row, sums, columns, column, every_lane())
            _add_four_rows(matrix, x, row, sums, columns, whole, left)
        for row in range(fours, last):
            for column in range(0, whole, LANES):
                _add_row(matrix, x, row, sums, columns, column, every_lane())
            _add_row(matrix, x, row, sums, columns, whole, left)
    for block in prange((columns + _BLOCK_COLUMNS - 1) // _BLOCK_COLUMNS):
        first = block * _BLOCK_COLUMNS
        add_parts(parts, bias, out, first, min(first + _BLOCK_COLUMNS, columns))


def multiply_rows(
    matrix: np.ndarray, x: np.ndarray, out: np.ndarray, bias: np.ndarray | None = None
) -> None:
    """Write `matrix x + bias`, for a matrix `[outputs, inputs]`.

    Args:
        matrix: float32, or uint16 for bfloat16 patterns, flat.
        x: float32 `[inputs]`.
        out: float32 `[outputs]`.
        bias: float32 `[outputs]`.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    _multiply_rows(matrix, x, _checked(matrix, x, out, bias), out)


def multiply_columns(
    matrix: np.ndarray, x: np.ndarray, out: np.ndarray, bias: np.ndarray | None = None
) -> None:
    """Write `x matrix + bias`, for a matrix `[inputs, outputs]`; arguments as `multiply_rows`.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    bias = _checked(matrix, x, out, bias)
    parts = parts_memory(x.size, out.size)
    _multiply_columns(matrix, x, bias, parts, rows_of_part(x.size), out)


def _checked(
    matrix: np.ndarray, x: np.ndarray, out: np.ndarray, bias: np.ndarray | None
) -> np.ndarray:
    """Return the bias; zeros for none."""
    require_flat("x", x, x.size, np.float32)
    require_flat("out", out, out.size, np.float32, write=True)
    require_flat("matrix", matrix, x.size * out.size, np.float32, np.uint16)
    bias = np.zeros(out.size, np.float32) if bias is None else bias
    require_flat("bias", bias, out.size, np.float32)
    return bias
