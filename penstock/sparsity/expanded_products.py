"""The products of a sparse weight on a device whose dense product is the fastest, such as a GPU.

The weight is expanded for the time of a product. The gradient of its entries is selected from the
dense product of a band of rows at a time, so the dense gradient never exists as a whole. On the
device the mask is a bitmap: one bit per element, whatever the sparsity.

All operations read by index and none writes by index. In PyTorch's deterministic mode a write by
index sorts its indices first, which takes as long as the product itself. The functions run on
tensors of any device; results have the bits of PyTorch's dense product.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from penstock.kernels.sparse_expansion import bitmap_of
from penstock.sparsity.packed_index import PackedIndex

BAND_ELEMENTS = 1 << 23
"""Elements of a band; rows of the weight decide its bands, so bits do not depend on memory."""

BAND_ROWS = 128
"""Rows of which a band has a multiple: dense products are computed in tiles of so many rows."""

_WORD = 32  # elements of a word of the bitmap; a row begins with a word
# Per element of a band: flags (1), their complement (1), their sums and a copy for these (8).
_EXPANDING_BYTES = 10
_FLAG_BYTES = 2  # per element of a band: flags, and a copy without the padding of rows
_POSITION_BYTES = 16  # a position, and the copy that PyTorch makes of it on the CPU


@dataclass(frozen=True, eq=False)
class MaskBitmap:
    """The mask of a weight on a device.

    Attributes:
        shape: rows and columns of the weight.
        row_starts: int64 `[rows + 1]`, in host memory: kept entries before each row.
        bits: uint8 `[rows, bitmap bytes of a row]` on the device, the lowest bit first.
    """

    shape: tuple[int, int]
    row_starts: np.ndarray
    bits: torch.Tensor

    @property
    def entries(self) -> int:
        """The number of entries that the mask keeps."""
        return int(self.row_starts[-1])

    def entries_in(self, band: range) -> slice:
        """Return which entries are in a band of rows."""
        return slice(int(self.row_starts[band.start]), int(self.row_starts[band.stop]))

    def flags(self, band: range) -> torch.Tensor:
        """Return 1 for each kept element of a band of rows and 0 for others, uint8 [elements]."""
        shifts = torch.arange(8, dtype=torch.uint8, device=self.bits.device)
        flags = (self.bits[band.start : band.stop].unsqueeze(2) >> shifts).bitwise_and_(1)
        return flags.flatten(1)[:, : self.shape[1]].reshape(-1)


def row_bytes(columns: int) -> int:
    """Return the bytes of a row of a bitmap."""
    return -(-columns // _WORD) * (_WORD // 8)


def bitmap_bytes(shape: tuple[int, int]) -> int:
    """Return the bytes of a bitmap; they do not depend on the mask."""
    return shape[0] * row_bytes(shape[1])


def host_bitmap(index: PackedIndex, shape: tuple[int, int]) -> MaskBitmap:
    """Return the bitmap of a mask in host memory.

    Raises:
        ValueError: the mask is not that of a whole weight of this shape.
    """
    row_starts, columns = index.rows_and_columns(*shape)
    words = bitmap_of(row_starts, columns, shape[1])
    bits = torch.from_numpy(words.view(np.uint8)).view(shape[0], row_bytes(shape[1]))
    return MaskBitmap(shape, row_starts, bits)


def expand(mask: MaskBitmap, values: torch.Tensor) -> torch.Tensor:
    """Return the weight `[rows, columns]` of the values' type, 0 where the mask keeps nothing.

    Args:
        mask: on the device of the values.
        values: `[entries]`, in the order of the store.
    """
    _check_values(mask, values)
    dense = values.new_empty(mask.shape)
    for band in bands_of(mask.shape):
        _expand_band(mask, values, band, dense[band.start : band.stop].view(-1))
    return dense


def multiply_expanded(
    mask: MaskBitmap,
    values: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
) -> torch.Tensor:
    """Return `x W^T + bias` or, `transposed`, `x W + bias`.

    Args:
        mask: the mask of `W`, on the device of the other arguments.
        values: `[entries]`, in the order of the store.
        x: of the values' type, `[tokens, features]`.
        bias: `[outputs]`.
    """
    features = mask.shape[0 if transposed else 1]
    if x.dtype != values.dtype or x.dim() != 2 or x.shape[1] != features:
        raise ValueError(
            f"x: expected {values.dtype} [tokens, {features}], got {x.dtype} {list(x.shape)}"
        )
    weight = expand(mask, values)
    matrix = weight if transposed else weight.t()
    if bias is None:
        return torch.mm(x, matrix)
    return torch.addmm(bias.to(x.dtype), x, matrix)


def entry_gradient(
    mask: MaskBitmap, of_rows: torch.Tensor, of_columns: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the entries: `of_rows^T of_columns` at their places.

    The gradient is rounded to the type of the arguments, as that of a dense weight.

    Args:
        mask: on the device of the other arguments.
        of_rows: `[tokens, rows]`, the gradient of the outputs, or the inputs of `x W`.
        of_columns: `[tokens, columns]`, of the same type.

    Returns:
        float32 `[entries]`, in the order of the store.
    """
    found = (of_rows.shape[1:], of_columns.shape[1:])
    if found != (mask.shape[:1], mask.shape[1:]) or len(of_rows) != len(of_columns):
        raise ValueError(
            f"gradient: expected [tokens, {mask.shape[0]}] and [tokens, {mask.shape[1]}], got "
            f"{list(of_rows.shape)} and {list(of_columns.shape)}"
        )
    kept = torch.empty(mask.entries, dtype=torch.float32, device=of_rows.device)
    for band in bands_of(mask.shape):
        entries = mask.entries_in(band)
        if entries.start < entries.stop:
            tile = torch.mm(of_rows[:, band.start : band.stop].t(), of_columns)
            kept[entries] = _selected(mask, band, tile)
            del tile  # freed before the next band
    return kept


def select_entries(mask: MaskBitmap, dense: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor `[rows, columns]` at the entries of the mask.

    Returns:
        float32 `[entries]`, in the order of the store.
    """
    if tuple(dense.shape) != mask.shape:
        raise ValueError(
            f"dense tensor: expected {list(mask.shape)}, got {list(dense.shape)}, which the mask "
            "does not fit"
        )
    kept = torch.empty(mask.entries, dtype=torch.float32, device=dense.device)
    for band in bands_of(mask.shape):
        entries = mask.entries_in(band)
        if entries.start < entries.stop:
            kept[entries] = _selected(mask, band, dense[band.start : band.stop])
    return kept


def expansion_bytes(shape: tuple[int, int]) -> int:
    """Return the most bytes that `expand` takes besides its result."""
    return _EXPANDING_BYTES * _padded_elements(shape)


def selection_bytes(shape: tuple[int, int], capacity: int, dtype: torch.dtype) -> int:
    """Return the most bytes that `select_entries` takes besides its result, with masks of at most
    `capacity` entries."""
    most = min(capacity, _band_rows(shape) * shape[1])
    return _FLAG_BYTES * _padded_elements(shape) + (_POSITION_BYTES + dtype.itemsize) * most


def expanded_product_bytes(shape: tuple[int, int], capacity: int, dtype: torch.dtype) -> int:
    """Return the most bytes that a product, or the gradient of the entries, takes besides its
    result."""
    expanded = math.prod(shape) * dtype.itemsize + expansion_bytes(shape)
    tile = _band_rows(shape) * shape[1] * dtype.itemsize
    return max(expanded, tile + selection_bytes(shape, capacity, dtype))


def _expand_band(mask: MaskBitmap, values: torch.Tensor, band: range, tile: torch.Tensor) -> None:
    entries = mask.entries_in(band)
    if entries.start == entries.stop:
        tile.zero_()
        return
    flags = mask.flags(band)
    # The entry of a kept element is the number of kept ones before it; others read any entry.
    places = flags.cumsum(0, dtype=torch.int32).sub_(1).clamp_(min=0)
    torch.index_select(values[entries], 0, places, out=tile)
    tile.masked_fill_(flags.logical_not(), 0)


def _selected(mask: MaskBitmap, band: range, tile: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense band at the entries of the mask, of the type of the band."""
    entries = mask.entries_in(band)
    # The number is known, so that the host need not wait for the device.
    positions = torch.nonzero_static(mask.flags(band), size=entries.stop - entries.start)
    return tile.reshape(-1).index_select(0, positions.view(-1))


def bands_of(shape: tuple[int, int]) -> list[range]:
    """Return the bands of rows whose dense products select the gradient of the entries."""
    rows, step = shape[0], _band_rows(shape)
    return [range(low, min(low + step, rows)) for low in range(0, rows, step)]


def _band_rows(shape: tuple[int, int]) -> int:
    """Return the rows of a band: a multiple of `BAND_ROWS`, if so many fit."""
    rows, columns = shape
    most = max(1, BAND_ELEMENTS // (8 * row_bytes(columns)))
    if most > BAND_ROWS:
        most -= most % BAND_ROWS
    return min(most, rows)


def _padded_elements(shape: tuple[int, int]) -> int:
    return _band_rows(shape) * 8 * row_bytes(shape[1])


def _check_values(mask: MaskBitmap, values: torch.Tensor) -> None:
    if values.shape != (mask.entries,):
        raise ValueError(
            f"values: expected [{mask.entries}], one per entry of the mask, got "
            f"{list(values.shape)}"
        )
