"""The products of a sparse matrix with activations, and the gradient of its entries.

Activations `[tokens, features]` are packed into panels of tokens (`sparse_panels`), and outputs are
unpacked, while they are in a cache. A thread packs one panel at a time in memory of its own. If
there are fewer panels than threads, all panels are packed first and shared. The gradient of entries
shares as many panels as have 4 MiB, at least one. Each sum has one order, which the matrix and the
panels decide: a row's entries are added in the order of their columns, and an entry's gradient is
added panel after panel, within a panel in an order that depends on whether the processor has
AVX-512. Threads divide the work by whole sums, so their number changes no bit.
"""

from typing import Literal, NamedTuple

import numba
import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.compilation import inlined, kernel
from penstock.kernels.memory import cache_lines
from penstock.kernels.pair_code import has_bfloat16_dot
from penstock.kernels.row_prefetch import fetch_row_ahead
from penstock.kernels.sparse_dots import (
    add_products_by_dots,
    add_products_of_floats,
    add_products_unpacked,
)
from penstock.kernels.sparse_panels import (
    STRIPE,
    pack_floats,
    pack_shorts,
    unpack_floats,
    unpack_shorts,
)
from penstock.kernels.sparse_vectors import (
    add_scaled_by_dots,
    add_scaled_floats,
    add_scaled_unpacked,
    float_of,
    interleaved_rows,
)
from penstock.kernels.vectors import LANES

Bfloat16 = Literal["dots", "unpacked"]
"""How bfloat16 is multiplied: by the processor's dot product of pairs, or as float32. These differ
in the last bits."""

_LEAST_SHARE = 16  # entries of a thread, of a matrix with so few
_BLOCK = 16384  # entries of a unit of work of a gather
_TOGETHER = 4 << 20  # bytes of panels that threads read together, which stay in the last cache


class BlockedCsr(NamedTuple):
    """A sparse matrix in the order of a product; see `penstock.kernels.sparse_layout`.

    Attributes:
        shape: rows and columns.
        block_columns, band_rows: columns of a block, rows of a band.
        cells: int64 `[bands * blocks + 1]`, the first segment of each cell.
        rows: int32 `[segments]`; a row has at most one segment in a cell.
        starts: int32 `[segments + 1]`, the first entry of each segment. In a cell, no segment has
            fewer entries than the one before it: else `multiply` reads beyond it.
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
def _add_floats(targets, at, ends, x, xs, matrix, segment, rows, width):
    outputs, sums, bias = targets
    segment_rows, starts, columns, values = matrix
    add_scaled_floats(
        outputs, sums, at, bias, ends[0], ends[1], x, xs, segment_rows, starts, columns, values,
        segment, rows, width,
    )  # fmt: skip


@inlined
def _add_unpacked(targets, at, ends, x, xs, matrix, segment, rows, width):
    outputs, sums, bias = targets
    segment_rows, starts, columns, values = matrix
    add_scaled_unpacked(
        outputs, sums, at, bias, ends[0], ends[1], x, xs, segment_rows, starts, columns, values,
        segment, rows, width,
    )  # fmt: skip


@inlined
def _add_by_dots(targets, at, ends, x, xs, matrix, segment, rows, width):
    outputs, sums, bias = targets
    segment_rows, starts, columns, values = matrix
    add_scaled_by_dots(
        outputs, sums, at, bias, ends[0], ends[1], x, xs, segment_rows, starts, columns, values,
        segment, rows, width,
    )  # fmt: skip


@inlined
def _pack_stripes(pack, part, parts, x, features, tokens, panels, low, high, panel_tokens):
    """One thread's share of the packing of panels `low` to `high`, which all threads read."""
    stripes = (features + STRIPE - 1) // STRIPE
    works = (high - low) * stripes
    for work in range(works * part // parts, works * (part + 1) // parts):
        panel, first = work // stripes, work % stripes * STRIPE
        token = (low + panel) * panel_tokens
        sizes = (features, token, min(token + panel_tokens, tokens))
        last = min(first + STRIPE, features)
        pack(x, sizes, panels, panel * features * panel_tokens, panel_tokens, first, last)


@kernel
def _pack_all_floats(parts, x, features, tokens, panels, low, high, panel_tokens):
    for part in prange(parts):
        _pack_stripes(
            pack_floats, np.int64(part), parts, x, features, tokens, panels, low, high,
            panel_tokens,
        )  # fmt: skip


@kernel
def _pack_all_shorts(parts, x, features, tokens, panels, low, high, panel_tokens):
    for part in prange(parts):
        _pack_stripes(
            pack_shorts, np.int64(part), parts, x, features, tokens, panels, low, high,
            panel_tokens,
        )  # fmt: skip


@inlined
def _multiply_part(add, pack, unpack, part, parts, arrays, matrix, sizes, interleaved, width):
    """One thread's tasks, each a band of rows of one panel.

    `arrays`: activations and outputs, values and bias, panels of activations, float32 sums, panels
    of outputs (the sums themselves for float32).
    `sizes`: columns and rows, columns of a block, rows of a band, tokens, and whether threads share
    panels: else each has one of its own, and sums of one band.
    `interleaved`: a tuple with an element for each row that is interleaved.
    """
    x, out, values, bias, panels, sums, outputs = arrays
    columns, rows, block_columns, band_rows, tokens, is_shared = sizes
    cells, segment_rows, starts, local = matrix
    targets, entries = (outputs, sums, bias), (segment_rows, starts, local, values)
    panel_tokens, group = LANES * len(width), len(interleaved)
    bands = (rows + band_rows - 1) // band_rows
    blocks = (cells.size - 1) // bands
    works = (tokens + panel_tokens - 1) // panel_tokens * bands
    packed = -1
    for work in range(works * part // parts, works * (part + 1) // parts):
        panel, band = work // bands, work % bands
        token = panel * panel_tokens
        end = min(token + panel_tokens, tokens)
        first_row, end_row = band * band_rows, min((band + 1) * band_rows, rows)
        panel_at = (panel if is_shared else part) * columns * panel_tokens
        first_sum = panel * rows if is_shared else part * band_rows - first_row
        if not is_shared and panel != packed:
            pack(x, (columns, token, end), panels, panel_at, panel_tokens, 0, columns)
            packed = panel
        sums_at = first_sum * panel_tokens
        for block in range(blocks):
            cell = band * blocks + block
            x_at = panel_at + block * block_columns * panel_tokens
            ends = (block == 0, block == blocks - 1)
            segment, end_segment = cells[cell], cells[cell + 1]
            grouped = segment + (end_segment - segment) // group * group
            for s in range(segment, grouped, group):
                # Of one block, sums are not read. To interleaved rows, a prefetch brought nothing.
                if blocks > 1 and group == 1:
                    fetch_row_ahead(sums, sums_at, segment_rows, s, end_segment, width)
                add(targets, sums_at, ends, panels, x_at, entries, s, interleaved, width)
            for s in range(grouped, end_segment):
                add(targets, sums_at, ends, panels, x_at, entries, s, (0,), width)
        at = (first_sum + first_row) * panel_tokens
        unpack(outputs, at, panel_tokens, out, (rows, token, end), first_row, end_row)


@kernel
def _multiply_floats(parts, arrays, matrix, sizes, interleaved, width):
    for part in prange(parts):
        _multiply_part(
            _add_floats, pack_floats, unpack_floats, np.int64(part), parts, arrays, matrix, sizes,
            interleaved, width,
        )  # fmt: skip


@kernel
def _multiply_unpacked(parts, arrays, matrix, sizes, interleaved, width):
    for part in prange(parts):
        _multiply_part(
            _add_unpacked, pack_shorts, unpack_shorts, np.int64(part), parts, arrays, matrix, sizes,
            interleaved, width,
        )  # fmt: skip


@kernel
def _multiply_by_dots(parts, arrays, matrix, sizes, interleaved, width):
    for part in prange(parts):
        _multiply_part(
            _add_by_dots, pack_shorts, unpack_shorts, np.int64(part), parts, arrays, matrix, sizes,
            interleaved, width,
        )  # fmt: skip


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
def _gradient_part(products, part, parts, arrays, count, matrix, sizes, width):
    """One thread's entries of `count` panels: of every cell, as many segments as make up its share
    of entries.

    `arrays`: panels of activations and of gradients of outputs, and the totals of entries.
    """
    x, dy, totals = arrays
    columns, rows, block_columns, blocks = sizes
    cells, segment_rows, starts, local = matrix
    panel_tokens = LANES * len(width)
    for panel in range(count):
        for cell in range(cells.size - 1):
            low, high = cells[cell], cells[cell + 1]
            entry, entries = starts[low], starts[high] - starts[low]
            first = _segment_from(starts, low, high, entry + entries * part // parts)
            last = _segment_from(starts, low, high, entry + entries * (part + 1) // parts)
            x_at = (panel * columns + cell % blocks * block_columns) * panel_tokens
            for s in range(first, last):
                fetch_row_ahead(dy, panel * rows * panel_tokens, segment_rows, s, last, width)
                g = (panel * rows + segment_rows[s]) * panel_tokens
                products(totals, dy, g, x, x_at, local, starts[s], starts[s + 1], width)


@kernel
def _gradient_of_floats(parts, arrays, count, matrix, sizes, width):
    for part in prange(parts):
        _gradient_part(
            _products_of_floats, np.int64(part), parts, arrays, count, matrix, sizes, width
        )


@kernel
def _gradient_unpacked(parts, arrays, count, matrix, sizes, width):
    for part in prange(parts):
        _gradient_part(
            _products_unpacked, np.int64(part), parts, arrays, count, matrix, sizes, width
        )


@kernel
def _gradient_by_dots(parts, arrays, count, matrix, sizes, width):
    for part in prange(parts):
        _gradient_part(
            _products_by_dots, np.int64(part), parts, arrays, count, matrix, sizes, width
        )


# Within a block, slices and unsigned places let LLVM drop the checks for negative indices, which
# make the loops several times slower.


@kernel
def _gather(values, positions, gathered):
    for block in prange((positions.size + _BLOCK - 1) // _BLOCK):
        first, end = block * _BLOCK, min((block + 1) * _BLOCK, positions.size)
        places, target = positions[first:end], gathered[first:end]
        for n in range(places.size):
            target[n] = float_of(values[np.uint32(places[n])])


@kernel
def _gather_patterns(values, positions, gathered):
    for block in prange((positions.size + _BLOCK - 1) // _BLOCK):
        first, end = block * _BLOCK, min((block + 1) * _BLOCK, positions.size)
        places, target = positions[first:end], gathered[first:end]
        for n in range(places.size):
            target[n] = values[np.uint32(places[n])]


@kernel
def _scatter(totals, positions, scattered):
    for block in prange((positions.size + _BLOCK - 1) // _BLOCK):
        first, end = block * _BLOCK, min((block + 1) * _BLOCK, positions.size)
        places, source = positions[first:end], totals[first:end]
        for n in range(places.size):
            scattered[np.uint32(places[n])] = source[n]


def gather(values: np.ndarray, positions: np.ndarray, bfloat16: Bfloat16) -> np.ndarray:
    """Return values in another order `[entries]`, as `multiply` takes them: float32, or patterns
    (uint16) of bfloat16 values that are multiplied by dot products.

    Args:
        values: float32, or uint16 for bfloat16 patterns, `[entries]`.
        positions: int32 `[entries]`, where each of the result's values is.
        bfloat16: how bfloat16 is multiplied.
    """
    require_flat("values", values, positions.size, np.float32, np.uint16)
    require_flat("positions", positions, positions.size, np.int32)
    kept = values.dtype == np.uint16 and bfloat16 == "dots"
    gathered = np.empty(positions.size, np.uint16 if kept else np.float32)
    (_gather_patterns if kept else _gather)(values, positions, gathered)
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
    """Write the products of a matrix and activations, `out = W x + bias` for every token.

    Args:
        matrix: the matrix, `[rows, columns]`.
        values: `[entries]` in the order of the matrix, as `gather` returns them.
        x: float32, or uint16 for bfloat16 patterns, `[tokens * columns]`.
        out: of the same type, `[tokens * rows]`, rounded once.
        panel_tokens: a multiple of 16; of 32 for bfloat16.
        bias: float32 `[rows]`.
        bfloat16: how bfloat16 is multiplied.

    Raises:
        ValueError: an array has another type, length or layout, or this processor has no dot
            product of bfloat16.
    """
    rows, columns = matrix.shape
    width, tokens = _check(matrix, x, panel_tokens, bfloat16)
    by_dots = x.dtype == np.uint16 and bfloat16 == "dots"
    require_flat("values", values, matrix.columns.size, np.uint16 if by_dots else np.float32)
    require_flat("out", out, tokens * rows, x.dtype.type, write=True)
    bias = np.zeros(rows, np.float32) if bias is None else bias
    require_flat("bias", bias, rows, np.float32)
    is_float = x.dtype == np.float32
    count, band_rows = -(-tokens // panel_tokens), matrix.band_rows
    parts = max(1, min(numba.get_num_threads(), count * matrix.bands))
    is_shared = count < parts
    sizes = (columns, rows, matrix.block_columns, band_rows, tokens, is_shared)
    held = (count * columns, count * rows) if is_shared else (parts * columns, parts * band_rows)
    panels = cache_lines(held[0] * panel_tokens, x.dtype.type)
    sums = cache_lines(held[1] * panel_tokens, np.float32)
    outputs = sums if is_float else cache_lines(held[1] * panel_tokens, x.dtype.type)
    run = _multiply_by_dots if by_dots else _multiply_unpacked
    run = _multiply_floats if is_float else run
    arrays = (x, out, values, bias, panels, sums, outputs)
    if is_shared:
        pack = _pack_all_floats if is_float else _pack_all_shorts
        pack(parts, x, columns, tokens, panels, 0, count, panel_tokens)
    run(parts, arrays, matrix[3:7], sizes, (0,) * interleaved_rows(panel_tokens), width)


def entry_gradient(
    matrix: BlockedCsr,
    x: np.ndarray,
    dy: np.ndarray,
    *,
    panel_tokens: int,
    bfloat16: Bfloat16 = "unpacked",
) -> np.ndarray:
    """Return the gradient of each entry, the sum over tokens of output gradient times input.

    Args:
        matrix: the matrix, `[rows, columns]`.
        x: inputs, `[tokens * columns]`, as in `multiply`.
        dy: the outputs' gradients, of the same type, `[tokens * rows]`.
        panel_tokens, bfloat16: as in `multiply`.

    Returns:
        float32 `[entries]`, in the order of the store.

    Raises:
        ValueError: as in `multiply`.
    """
    rows, columns = matrix.shape
    width, tokens = _check(matrix, x, panel_tokens, bfloat16)
    require_flat("dy", dy, tokens * rows, x.dtype.type)
    threads = numba.get_num_threads()
    parts = max(1, min(threads, matrix.columns.size // _LEAST_SHARE))
    totals = np.zeros(matrix.columns.size, np.float32)
    count = -(-tokens // panel_tokens)
    together = _TOGETHER // ((rows + columns) * panel_tokens * x.itemsize)
    together = max(1, min(count, together))
    panels = [
        cache_lines(together * features * panel_tokens, x.dtype.type)
        for features in (columns, rows)
    ]
    sizes = (columns, rows, matrix.block_columns, matrix.blocks)
    pack = _pack_all_floats if x.dtype == np.float32 else _pack_all_shorts
    run = _gradient_by_dots if bfloat16 == "dots" else _gradient_unpacked
    run = _gradient_of_floats if x.dtype == np.float32 else run
    for low in range(0, count, together):
        high = min(low + together, count)
        pack(threads, x, columns, tokens, panels[0], low, high, panel_tokens)
        pack(threads, dy, rows, tokens, panels[1], low, high, panel_tokens)
        run(parts, (*panels, totals), high - low, matrix[3:7], sizes, width)
    scattered = np.empty_like(totals)
    _scatter(totals, matrix.positions, scattered)
    return scattered


def _check(
    matrix: BlockedCsr, x: np.ndarray, panel_tokens: int, bfloat16: Bfloat16
) -> tuple[tuple[int, ...], int]:
    """Return the type of the compiled code, and how many tokens there are."""
    if x.dtype == np.uint16 and bfloat16 == "dots" and not has_bfloat16_dot():
        raise ValueError(
            "bfloat16: expected 'unpacked', got 'dots': this processor has no dot product of "
            "bfloat16 (AVX512-BF16)"
        )
    step = 2 * LANES if x.dtype == np.uint16 else LANES
    if panel_tokens <= 0 or panel_tokens % step:
        raise ValueError(f"panel_tokens: expected a multiple of {step}, got {panel_tokens}")
    tokens = x.size // matrix.shape[1]
    require_flat("x", x, tokens * matrix.shape[1], np.float32, np.uint16)
    return (0,) * (panel_tokens // LANES), tokens
