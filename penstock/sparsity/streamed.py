"""A sparse weight on its way from the store to an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.sparsity.packed_index import PackedIndex  # which loads a compiler


@dataclass(frozen=True, eq=False)
class SparseWeight:
    """What a fetch returns for a sparse weight.

    Attributes:
        name: name of the weight.
        shape: of the dense weight.
        values: float32 or bfloat16 `[kept]`, in the order of the mask; a view of the
            store's memory.
        index: the mask.
        version: number of committed changes of this mask since the start of the run. For one
            engine, equal versions of a weight have equal masks, so an engine may keep what it
            derives from a mask: changes are only appended, and a replayed step makes the same
            change. A resume may go on from an earlier step, and makes new engines and
            `SparseWeights`.
        dense_gradient: whether the store wants the gradient of every element in this step, of the
            dense shape, instead of one number per kept entry.
    """

    name: str
    shape: tuple[int, ...]
    values: torch.Tensor
    index: PackedIndex
    version: int
    dense_gradient: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: values and mask."""
        return self.values.nbytes + self.index.nbytes


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of a weight as a matrix: its first dimension, and the product of the
    others."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, math.prod(shape) // rows


StreamedWeight = torch.Tensor | SparseWeight
"""What a fetch returns for one weight: a dense tensor, or the kept entries and their mask."""
