"""The products of a sparse matrix with panels of tokens, and the gradient of its entries.

Each sum has one order, which the matrix and the panels decide: a row's entries are added in the
order of their columns, and an entry's gradient is added panel after panel. Threads share whole
sums, so their number changes no bit.
"""

from typing import Literal, NamedTuple

import numba
import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.compilation import inlined, kernel
from penstock.kernels.sparse_dots import (
    add_products_by_dots,
    add_products_of_floats,
    add_products_unpacked,
)
from penstock.kernels.sparse_vectors import (
    add_scaled_by_dots,
    add_scaled_floats,
    add_scaled_unpacked,
    float_of,
    has_bfloat16_dot,
)
from penstock.kernels.vectors import LANES

Bfloat16 = Literal["dots", "unpacked"]
"""How bfloat16 is multiplied: by the processor's dot product of pairs, or as float32. These differ
in the last bits."""

_LEAST_SHARE = 16  # entries of a thread, of a matrix with so few
_BLOCK = 16384  # entries of a unit of work of a gather


class BlockedCsr(NamedTuple):
    """A sparse matrix in the order of a product; see `penstock.kernels.sparse_layout`.

    Attributes:
        shape: rows and columns.
        block_columns, band_rows: columns of a block, rows of a band.
        cells: int64 `[bands * blocks + 1]`, the first segment of each cell.
        rows: int32 `[segments]`.
        starts: int32 `[segments + 1]`, the first entry of each segment.
        columns: uint16 `[entries]`, from the first column of the block.
        positions: int32 `[entries]`, where each entry's value is in the order of the store.
    """

    shape: tuple[int, int]
    block_columns: int
    band_rows: int
    cells: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    columns: np.ndarray
    positions: np.ndarray

    @property
    def blocks(self) -> int:
        """Blocks of a band."""
        return max(1, -(-self.shape[1] // self.block_columns))

    @property
    def bands(self) -> int:
        """Bands of rows."""
        return -(-self.shape[0] // self.band_rows)


@inlined
def _add_floats(out, o, sums, s, start, first, last, x, xs, columns, values, begin, end, width):
    add_scaled_floats(
        out, o, sums, s, start, first, last, x, xs, columns, values, begin, end, width
    )


@inlined
def _add_unpacked(out, o, sums, s, start, first, last, x, xs, columns, values, begin, end, width):
    add_scaled_unpacked(
        out, o, sums, s, start, first, last, x, xs, columns, values, begin, end, width
    )


@inlined
def _add_by_dots(out, o, sums, s, start, first, last, x, xs, columns, values, begin, end, width):
    add_scaled_by_dots(
        out, o, sums, s, start, first, last, x, xs, columns, values, begin, end, width
    )


@inlined
def _multiply_part(add, part, parts, x, out, sums, bias, matrix, values, sizes, width):
    """One thread's tasks, each a band of rows of one panel.

    `sizes`: features in and out, columns of a block, rows of a band, panels, and whether the sums
    are the outputs themselves; otherwise they are a band of rows per thread.
    """
    inputs, outputs, block_columns, band_rows, panels, in_place = sizes
    cells, rows, starts, columns = matrix
    tokens = LANES * len(width)
    bands = (outputs + band_rows - 1) // band_rows
    blocks = (cells.size - 1) // bands
    for task in range(part, panels * bands, parts):
        panel, band = task // bands, task % bands
        first_sum = panel * outputs if in_place else (part - band) * band_rows
        for block in range(blocks):
            cell = band * blocks + block
            x_at = (panel * inputs + block * block_columns) * tokens
            first, last = block == 0, block == blocks - 1
            for s in range(cells[cell], cells[cell + 1]):
                row = rows[s]
                o = (panel * outputs + row) * tokens
                at = (first_sum + row) * tokens
                begin, end = starts[s], starts[s + 1]
                add(
                    out, o, sums, at, bias[row], first, last, x, x_at, columns, values, begin, end,
                    width,
                )  # fmt: skip


@kernel
def _multiply_floats(parts, x, out, sums, bias, matrix, values, sizes, width):
    for part in prange(parts):
        _multiply_part(_add_floats, part, parts, x, out, sums, bias, matrix, values, sizes, width)


@kernel
def _multiply_unpacked(parts, x, out, sums, bias, matrix, values, sizes, width):
    for part in prange(parts):
        _multiply_part(_add_unpacked, part, parts, x, out, sums, bias, matrix, values, sizes, width)


@kernel
def _multiply_by_dots(parts, x, out, sums, bias, matrix, values, sizes, width):
    for part in prange(parts):
        _multiply_part(_add_by_dots, part, parts, x, out, sums, bias, matrix, values, sizes, width)


@inlined
def _products_of_floats(totals, gradients, g, x, xs, columns, begin, end, width):
    add_products_of_floats(totals, gradients, g, x, xs, columns, begin, end, width)


@inlined
def _products_unpacked(totals, gradients, g, x, xs, columns, begin, end, width):
    add_products_unpacked(totals, gradients, g, x, xs, columns, begin, end, width)


@inlined
def _products_by_dots(totals, gradients, g, x, xs, columns, begin, end, width):
    add_products_by_dots(totals, gradients, g, x, xs, columns, begin, end, width)


@inlined
def _segment_from(starts, low, high, entry):
    """The first segment from `low` to `high` that begins at this entry or later."""
    while low < high:
        middle = (low + high) // 2
        if starts[middle] < entry:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def _gradient_part(products, part, parts, x, gradients, totals, matrix, sizes, width):
    """One thread's entries: of every cell, as many segments as make up its share of entries."""
    inputs, outputs, block_columns, blocks, panels = sizes
    cells, rows, starts, columns = matrix
    tokens = LANES * len(width)
    for panel in range(panels):
        for cell in range(cells.size - 1):
            low, high = cells[cell], cells[cell + 1]
            entry, count = starts[low], starts[high] - starts[low]
            first = _segment_from(starts, low, high, entry + count * part // parts)
            last = _segment_from(starts, low, high, entry + count * (part + 1) // parts)
            x_at = (panel * inputs + cell % blocks * block_columns) * tokens
            for s in range(first, last):
                g = (panel * outputs + rows[s]) * tokens
                products(totals, gradients, g, x, x_at, columns, starts[s], starts[s + 1], width)


@kernel
def _gradient_of_floats(parts, x, gradients, totals, matrix, sizes, width):
    for part in prange(parts):
        _gradient_part(_products_of_floats, part, parts, x, gradients, totals, matrix, sizes, width)


@kernel
def _gradient_unpacked(parts, x, gradients, totals, matrix, sizes, width):
    for part in prange(parts):
        _gradient_part(_products_unpacked, part, parts, x, gradients, totals, matrix, sizes, width)


@kernel
def _gradient_by_dots(parts, x, gradients, totals, matrix, sizes, width):
    for part in prange(parts):
        _gradient_part(_products_by_dots, part, parts, x, gradients, totals, matrix, sizes, width)


@kernel
def _gather(values, positions, gathered):
    for block in prange((positions.size + _BLOCK - 1) // _BLOCK):
        for n in range(block * _BLOCK, min((block + 1) * _BLOCK, positions.size)):
            gathered[n] = float_of(values[positions[n]])


@kernel
def _scatter(totals, positions, scattered):
    for block in prange((positions.size + _BLOCK - 1) // _BLOCK):
        for n in range(block * _BLOCK, min((block + 1) * _BLOCK, positions.size)):
            scattered[positions[n]] = totals[n]


def gather(values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return values in another order, float32 `[entries]`.

    Args:
        values: float32, or uint16 for bfloat16 patterns, `[entries]`.
        positions: int32 `[entries]`, where each of the result's values is.
    """
    require_flat("values", values, positions.size, np.float32, np.uint16)
    require_flat("positions", positions, positions.size, np.int32)
    gathered = np.empty(positions.size, np.float32)
    _gather(values, positions, gathered)
    return gathered


def multiply(
    matrix: BlockedCsr,
    values: np.ndarray,
    x: np.ndarray,
    out: np.ndarray,
    *,
    panel_tokens: int,
    bias: np.ndarray | None = None,
    bfloat16: Bfloat16 = "unpacked",
) -> None:
    """Write the products of a matrix and panels of activations, `out = W x + bias`.

    Args:
        matrix: the matrix, `[rows, columns]`.
        values: float32 `[entries]` in the order of the matrix; with panels of bfloat16, bfloat16
            values.
        x: panels of float32, or of uint16 for bfloat16 patterns,
            `[panels * columns * panel_tokens]`.
        out: panels of the same type, `[panels * rows * panel_tokens]`, rounded once.
        panel_tokens: a multiple of 16; of 32 for bfloat16.
        bias: float32 `[rows]`.
        bfloat16: how bfloat16 is multiplied.

    Raises:
        ValueError: an array has another type, length or layout, or this processor has no dot
            product of bfloat16.
    """
    rows, columns = matrix.shape
    width, panels = _check(matrix, x, panel_tokens, bfloat16)
    require_flat("values", values, matrix.columns.size, np.float32)
    require_flat("out", out, panels * rows * panel_tokens, x.dtype.type, write=True)
    bias = np.zeros(rows, np.float32) if bias is None else bias
    require_flat("bias", bias, rows, np.float32)
    is_float = x.dtype == np.float32
    sizes = (columns, rows, matrix.block_columns, matrix.band_rows, panels, int(is_float))
    parts = max(1, min(numba.get_num_threads(), panels * matrix.bands))
    sums = out if is_float else _cache_lines(parts * matrix.band_rows * panel_tokens)
    run = _multiply_by_dots if bfloat16 == "dots" else _multiply_unpacked
    run = _multiply_floats if is_float else run
    run(parts, x, out, sums, bias, matrix[3:7], values, sizes, width)


def entry_gradient(
    matrix: BlockedCsr,
    x: np.ndarray,
    gradients: np.ndarray,
    *,
    panel_tokens: int,
    bfloat16: Bfloat16 = "unpacked",
) -> np.ndarray:
    """Return the gradient of each entry, the sum over tokens of output gradient times input.

    Args:
        matrix: the matrix, `[rows, columns]`.
        x: panels of inputs, `[panels * columns * panel_tokens]`.
        gradients: panels of the outputs' gradients, `[panels * rows * panel_tokens]`.
        panel_tokens, bfloat16: as in `multiply`.

    Returns:
        float32 `[entries]`, in the order of the store.

    Raises:
        ValueError: as in `multiply`.
    """
    rows, columns = matrix.shape
    width, panels = _check(matrix, x, panel_tokens, bfloat16)
    require_flat("gradients", gradients, panels * rows * panel_tokens, x.dtype.type)
    parts = max(1, min(numba.get_num_threads(), matrix.columns.size // _LEAST_SHARE))
    totals = np.zeros(matrix.columns.size, np.float32)
    sizes = (columns, rows, matrix.block_columns, matrix.blocks, panels)
    run = _gradient_by_dots if bfloat16 == "dots" else _gradient_unpacked
    run = _gradient_of_floats if x.dtype == np.float32 else run
    run(parts, x, gradients, totals, matrix[3:7], sizes, width)
    scattered = np.empty_like(totals)
    _scatter(totals, matrix.positions, scattered)
    return scattered


def _cache_lines(count: int) -> np.ndarray:
    """Float32 memory that begins with a cache line: no vector lies in two of them."""
    memory = np.empty(count + LANES, np.float32)
    first = -memory.ctypes.data % 64 // 4
    return memory[first : first + count]


def _check(
    matrix: BlockedCsr, x: np.ndarray, panel_tokens: int, bfloat16: Bfloat16
) -> tuple[tuple[int, ...], int]:
    """Return the type of the compiled code, and how many panels there are."""
    if x.dtype == np.uint16 and bfloat16 == "dots" and not has_bfloat16_dot():
        raise ValueError(
            "bfloat16: expected 'unpacked', got 'dots': this processor has no dot product of "
            "bfloat16 (AVX512-BF16)"
        )
    step = 2 * LANES if x.dtype == np.uint16 else LANES
    if panel_tokens <= 0 or panel_tokens % step:
        raise ValueError(f"panel_tokens: expected a multiple of {step}, got {panel_tokens}")
    panel = matrix.shape[1] * panel_tokens
    panels = x.size // panel
    require_flat("x", x, panels * panel, np.float32, np.uint16)
    return (0,) * (panel_tokens // LANES), panels
