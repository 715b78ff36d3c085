"""The products of a sparse weight on a device whose dense product is the fastest, such as a GPU.

The weight is expanded once for all micro-batches of a stage. The gradient of its entries is
selected from the dense product of a band of rows at a time, so the dense gradient never exists as a
whole. On the device the mask is a bitmap: one bit per element, whatever the sparsity.

All operations read by index and none writes by index. In PyTorch's deterministic mode a write by
index sorts its indices first, which takes as long as the product itself. The functions run on
tensors of any device; results have the bits of PyTorch's dense product.
"""

import functools
import math
from collections.abc import Callable
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
_POSITION_BYTES = 16  # a position as it is found, and PyTorch's copy of it on the CPU
_PLACE_BYTES = 4  # a position as it is kept


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


class ExpandedProducts:
    """The products of one weight; the first that needs them makes the expanded weight, or the
    places of its entries, which stay as long as this object.

    Args:
        mask: on the device of all other arguments.
        values: `[entries]`, in the order of the store.
    """

    def __init__(self, mask: MaskBitmap, values: torch.Tensor) -> None:
        self._mask, self._values = mask, values

    @functools.cached_property
    def weight(self) -> torch.Tensor:
        """The weight `[rows, columns]`, as `expand` returns it."""
        return expand(self._mask, self._values)

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, transposed: bool = False
    ) -> torch.Tensor:
        """Return `x W^T + bias` or, `transposed`, `x W + bias`.

        Args:
            x: of the values' type, `[tokens, features]`.
            bias: `[outputs]`.
            transposed: whether rows of the weight are the features.
        """
        features = self._mask.shape[0 if transposed else 1]
        if x.dtype != self._values.dtype or x.dim() != 2 or x.shape[1] != features:
            raise ValueError(
                f"x: expected {self._values.dtype} [tokens, {features}], got {x.dtype} "
                f"{list(x.shape)}"
            )
        matrix = self.weight if transposed else self.weight.t()
        if bias is None:
            return torch.mm(x, matrix)
        return torch.addmm(bias.to(x.dtype), x, matrix)

    def entry_gradient(self, of_rows: torch.Tensor, of_columns: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the entries: `of_rows^T of_columns` at their places.

        The gradient is rounded to the type of the arguments, as that of a dense weight.

        Args:
            of_rows: `[tokens, rows]`, the gradient of the outputs, or the inputs of `x W`.
            of_columns: `[tokens, columns]`, of the same type.

        Returns:
            float32 `[entries]`, in the order of the store.
        """
        shape = self._mask.shape
        found = (of_rows.shape[1:], of_columns.shape[1:])
        if found != (shape[:1], shape[1:]) or len(of_rows) != len(of_columns):
            raise ValueError(
                f"gradient: expected [tokens, {shape[0]}] and [tokens, {shape[1]}], got "
                f"{list(of_rows.shape)} and {list(of_columns.shape)}"
            )
        return self._select(lambda rows: torch.mm(of_rows[:, rows].t(), of_columns))

    def select(self, dense: torch.Tensor) -> torch.Tensor:
        """Return the elements of a dense tensor `[rows, columns]` at the entries of the mask.

        Returns:
            float32 `[entries]`, in the order of the store.
        """
        if tuple(dense.shape) != self._mask.shape:
            raise ValueError(
                f"dense tensor: expected {list(self._mask.shape)}, got {list(dense.shape)}, which "
                "the mask does not fit"
            )
        return self._select(lambda rows: dense[rows])

    def _select(self, tile_of: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        kept = torch.empty(self._mask.entries, dtype=torch.float32, device=self._mask.bits.device)
        for band, places in self._places:
            tile = tile_of(slice(band.start, band.stop))
            kept[self._mask.entries_in(band)] = tile.reshape(-1).index_select(0, places)
            del tile  # freed before the next band
        return kept

    @functools.cached_property
    def _places(self) -> list[tuple[range, torch.Tensor]]:
        """The places of the entries within each band that has any, int32."""
        found = []
        for band in bands_of(self._mask.shape):
            entries = self._mask.entries_in(band)
            if entries.start < entries.stop:
                # The number is known, so that the host need not wait for the device.
                size = entries.stop - entries.start
                places = torch.nonzero_static(self._mask.flags(band), size=size)
                found.append((band, places.view(-1).int()))
        return found


def expansion_bytes(shape: tuple[int, int]) -> int:
    """Return the most bytes that `expand` takes besides its result."""
    return _EXPANDING_BYTES * _padded_elements(shape)


def expanded_bytes(shape: tuple[int, int], capacity: int, dtype: torch.dtype) -> int:
    """Return the most bytes that `ExpandedProducts` keeps, with masks of at most `capacity`
    entries."""
    return math.prod(shape) * dtype.itemsize + _PLACE_BYTES * capacity


def selection_bytes(shape: tuple[int, int], capacity: int, dtype: torch.dtype) -> int:
    """Return the most bytes that a selection of entries takes besides its result and what is
    kept."""
    most = min(capacity, _band_rows(shape) * shape[1])
    return _FLAG_BYTES * _padded_elements(shape) + (_POSITION_BYTES + dtype.itemsize) * most


def expanded_product_bytes(shape: tuple[int, int], capacity: int, dtype: torch.dtype) -> int:
    """Return the most bytes that a product, or the gradient of the entries, takes besides its
    result and what is kept."""
    tile = _band_rows(shape) * shape[1] * dtype.itemsize
    return max(expansion_bytes(shape), tile + selection_bytes(shape, capacity, dtype))


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
