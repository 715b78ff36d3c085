"""Sparse weights on a device that expands them for its dense products.

Values arrive in a slot with every fetch. A mask is copied to the device when it is new and stays
there, as a bitmap.
"""

import torch

from penstock.engine.lanes import Lanes
from penstock.engine.sparse_operand import BaseSparseOperand
from penstock.program import Program, WeightSpec, largest_stage
from penstock.sparsity import (
    ExpandedProducts,
    MaskBitmap,
    SparseWeight,
    bitmap_bytes,
    expanded_bytes,
    host_bitmap,
    matrix_shape,
)

_COLUMN_BYTES, _ROW_START_BYTES = 4, 8


class ExpandedWeight(BaseSparseOperand):
    """A sparse weight that is expanded on a device for all products of a stage.

    It is made for each arrival of the weight, and so is what its products keep.

    Args:
        weight: what the store has sent.
        values: its values, on the device.
        mask: its mask, on the device.
    """

    def __init__(self, weight: SparseWeight, values: torch.Tensor, mask: MaskBitmap) -> None:
        super().__init__(weight)
        self.values, self._mask, self._version = values, mask, weight.version
        self._products = ExpandedProducts(mask, values)
        self.beside_bytes = expanded_bytes(mask.shape, mask.entries, values.dtype)

    @property
    def kept_bytes(self) -> int:
        return self._mask.bits.nbytes

    @property
    def place(self) -> tuple[int, int, int, bool]:
        """The addresses of values and mask, the version of the mask, and whether gradients are
        dense: products of two arrivals with the same ones run the same kernels."""
        addresses = self.values.data_ptr(), self._mask.bits.data_ptr()
        return *addresses, self._version, self.dense_gradient

    def to_dense(self) -> torch.Tensor:
        return self._products.weight.view(self.shape)

    def _product(
        self, rows: torch.Tensor, bias: torch.Tensor | None, transposed: bool, tokens: int
    ) -> torch.Tensor:
        return self._products.multiply(rows, bias, transposed=transposed)

    def _entry_gradient(
        self, of_rows: torch.Tensor, of_columns: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        return self._products.entry_gradient(of_rows, of_columns)

    def _selected(self, gradient: torch.Tensor) -> torch.Tensor:
        return self._products.select(gradient.reshape(self._mask.shape))


class DeviceMasks:
    """The masks of an engine's sparse weights on its device, each in memory of its own.

    A bitmap has the same size for every mask of a weight, so a new mask overwrites the old one.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._masks: dict[str, tuple[int, MaskBitmap]] = {}

    def load(self, weight: SparseWeight) -> tuple[MaskBitmap, torch.Tensor | None]:
        """Return the mask of a weight on the device, and the host memory that is being copied.

        If the mask is new, its copy is queued in the copy lane; the host memory must stay until the
        copy is complete.

        Raises:
            ValueError: the values are not those of the mask.
        """
        version, mask = self._masks.get(weight.name, (-1, None))
        copied = None
        if mask is None or version != weight.version:
            here = host_bitmap(weight.index, matrix_shape(weight.shape))
            copied = here.bits
            bits = self._memory(copied) if mask is None else mask.bits
            # Computation that is queued already may read the former content of the memory.
            self._lanes.wait("copy", self._lanes.mark("compute"))
            self._lanes.copy("copy", bits, copied)
            mask = MaskBitmap(here.shape, here.row_starts, bits)
            self._masks[weight.name] = weight.version, mask
        if weight.values.shape != (mask.entries,) or weight.index.kept != mask.entries:
            raise ValueError(
                f"{weight.name}: expected {mask.entries} values and kept entries, as version "
                f"{weight.version} of its mask has, got {list(weight.values.shape)} values and "
                f"{weight.index.kept} kept entries; a changed mask needs a new version"
            )
        return mask, copied

    def _memory(self, like: torch.Tensor) -> torch.Tensor:
        return self._lanes.device_memory(like.nbytes).view(like.shape)


def most_bitmap_bytes(program: Program) -> int:
    """Return the bytes of the masks of a program's sparse weights on a device."""
    return sum(map(_bitmap_bytes, program.weights.values()))


def mask_staging_bytes(program: Program) -> int:
    """Return the most bytes of host memory that an engine needs for masks on their way to its
    device: bitmaps of two stages, the columns of one mask, and the row starts of all."""
    sparse = [spec for spec in program.weights.values() if spec.is_sparse]
    _, stage = largest_stage(program, _bitmap_bytes)
    columns = max((_COLUMN_BYTES * spec.capacity for spec in sparse), default=0)
    rows = sum(1 + matrix_shape(spec.shape)[0] for spec in sparse)
    return 2 * stage + columns + _ROW_START_BYTES * rows


def _bitmap_bytes(spec: WeightSpec) -> int:
    return bitmap_bytes(matrix_shape(spec.shape)) if spec.is_sparse else 0
