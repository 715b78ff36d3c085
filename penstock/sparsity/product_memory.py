"""The most bytes that sparse products and layouts take, for memory that is planned before a run.

Masks change and the choice of products is measured, so a plan holds for every mask of a capacity
and every choice that a measurement can return.
"""

import torch

from penstock.sparsity.product_choice import (
    LEAST_BLOCK_COLUMNS,
    LEAST_TILE_ROWS,
    TILE_BYTES,
    panel_sizes,
)

_COLUMN, _POSITION, _START, _LOCAL_COLUMN = 4, 4, 8, 2  # bytes
_CACHE_LINE = 64
_SEGMENT = 8  # its row and its first entry


def product_bytes(
    elements: int, features: int, capacity: int, tokens: int, dtype: torch.dtype
) -> int:
    """Return the most bytes that a product takes besides its result.

    Panels of all tokens are counted, which is the need of as many threads as there are panels.
    Fewer threads hold a panel each, and the gradient of entries holds few panels at once. But a
    plan does not depend on the number of threads. Activations that are not contiguous are copied.

    Args:
        elements: of the dense weight.
        features: of the inputs and outputs of the product, together.
        capacity: of the mask.
        tokens: of a call.
        dtype: of the activations.
    """
    panel = panel_sizes(dtype, tokens)[-1]
    padded = -(-tokens // panel) * panel
    panels = padded * features * dtype.itemsize
    if dtype == torch.bfloat16:
        panels += padded * features * 4  # the sums, before they are rounded
    copies = tokens * features * dtype.itemsize
    alignment = 3 * _CACHE_LINE + 2 * 4 * features  # of panels; the bias, converted, or zeros
    values = 2 * 4 * capacity  # gathered, or the sums of gradients and their scattered copy
    return panels + copies + alignment + values + tile_bytes(elements, features, dtype)


def tile_bytes(elements: int, features: int, dtype: torch.dtype) -> int:
    """Return the most bytes of the tile of a dense product."""
    least = LEAST_TILE_ROWS * features * dtype.itemsize
    return min(elements * dtype.itemsize, max(least, TILE_BYTES[-1]))


def max_layout_bytes(shape: tuple[int, int], capacity: int) -> int:
    """Return the most bytes that a layout keeps (`SparseLayout.nbytes`) for products of one choice.

    A product by a sparse kernel keeps an order of the entries. One by dense tiles keeps a bitmap
    or, if it goes through columns, the transposed mask.

    Args:
        shape: outputs and inputs.
        capacity: entries of the mask.
    """
    rows, columns = shape
    order = (_LOCAL_COLUMN + _POSITION) * capacity + _cells(shape)
    order += _SEGMENT * max_segments(shape, capacity)
    bitmap = rows * -(-columns // 32) * 4
    by_rows = _COLUMN * capacity + _START * (rows + 1)
    by_columns = (_COLUMN + _POSITION) * capacity + _START * (columns + 1)
    return by_rows + max(order, bitmap) + max(order, by_columns, bitmap) + order


def usual_layout_bytes(shape: tuple[int, int], capacity: int) -> int:
    """Return about the bytes that a layout keeps for sparse kernels: the mask by rows and two
    orders, whose segments are few beside the entries.

    Args:
        shape: outputs and inputs.
        capacity: entries of the mask.
    """
    order = (_LOCAL_COLUMN + _POSITION) * capacity
    return _COLUMN * capacity + _START * (shape[0] + 1) + 2 * order


def max_building_bytes(shape: tuple[int, int], capacity: int) -> int:
    """Return the most bytes that the making of a layout takes besides the layout."""
    rows, columns = shape
    counts = 4 * (rows * columns // LEAST_BLOCK_COLUMNS + rows + columns)
    transposed = (_COLUMN + _POSITION) * capacity + _START * (columns + 1)
    return counts + transposed + _SEGMENT * max_segments(shape, capacity)


def max_segments(shape: tuple[int, int], capacity: int) -> int:
    """Return the most segments of an order: parts of a row within a block of columns."""
    longest = max(shape)
    blocks = shape[0] * shape[1] // LEAST_BLOCK_COLUMNS + longest
    return min(blocks, capacity + 2 * longest) + 1


def _cells(shape: tuple[int, int]) -> int:
    """Bytes of the table of cells, of blocks and bands of least size."""
    rows, columns = shape
    return _START * (-(-rows // LEAST_TILE_ROWS) * -(-columns // LEAST_BLOCK_COLUMNS) + 1)
