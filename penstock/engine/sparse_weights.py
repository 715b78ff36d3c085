"""Sparse weights in an engine: values, mask, and the way that their products are computed.

What is derived from a mask is made once per change of the mask and kept; all micro-batches, both
sweeps and all engines of a process use the same.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.engine.product_choices import SparseProducts
from penstock.engine.sparse_operand import BaseSparseOperand
from penstock.errors import ConfigError, few
from penstock.program import Program, WeightSpec, extra_gradient_bytes
from penstock.sparsity import (
    Choice,
    SparseLayout,
    SparseWeight,
    entries_of,
    expanded_bytes,
    forward,
    matrix_shape,
    max_building_bytes,
    max_bytes,
    max_layout_bytes,
    to_dense,
    usual_layout_bytes,
    weight_gradient,
)


class PreparedSparse(BaseSparseOperand):
    """A sparse weight that is multiplied on the CPU.

    Results depend on the arguments and on the recorded choices alone.

    Args:
        weight: what the store has sent.
        layout: its mask.
        products: the choices.
    """

    def __init__(
        self, weight: SparseWeight, layout: SparseLayout, products: SparseProducts
    ) -> None:
        super().__init__(weight)
        self.layout = layout
        self._weight, self._products = weight, products

    @property
    def kept_bytes(self) -> int:
        return self.layout.nbytes

    def to_dense(self) -> torch.Tensor:
        return to_dense(self.layout, self._weight.values).view(self.shape)

    def _product(
        self, rows: torch.Tensor, bias: torch.Tensor | None, transposed: bool, tokens: int
    ) -> torch.Tensor:
        choice = None if rows.shape[0] == 1 else self._choice(tokens)
        values = self._weight.values
        return forward(self.layout, values, rows, bias, choice=choice, transposed=transposed)

    def _entry_gradient(
        self, of_rows: torch.Tensor, of_columns: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        return weight_gradient(self.layout, of_columns, of_rows, choice=self._choice(tokens))

    def _selected(self, gradient: torch.Tensor) -> torch.Tensor:
        return entries_of(self.layout, gradient.reshape(self.layout.shape))

    def _choice(self, tokens: int) -> Choice:
        layout, values = self.layout, self._weight.values
        sparsity = 1 - layout.entries / math.prod(layout.shape)
        return self._products.choice(layout.shape, values.dtype, tokens, sparsity)


class SparseWeights:
    """The layouts and choices of a run's sparse weights, for the engines of one process.

    Args:
        products: the choices.
    """

    def __init__(self, products: SparseProducts) -> None:
        self.products = products
        self._layouts: dict[str, tuple[int, SparseLayout]] = {}
        self._lock = threading.Lock()

    def prepare(self, weight: SparseWeight) -> PreparedSparse:
        """Return a weight to compute with; its layout is made if the mask is new.

        Raises:
            ValueError: the values are not those of the mask.
        """
        with self._lock:
            version, layout = self._layouts.get(weight.name, (-1, None))
            if layout is None or version != weight.version:
                layout = layout_of(weight)
                self._layouts[weight.name] = (weight.version, layout)
        if weight.values.shape != (layout.entries,) or weight.index.kept != layout.entries:
            raise ValueError(
                f"{weight.name}: expected {layout.entries} values and kept entries, as version "
                f"{weight.version} of its mask has, got {list(weight.values.shape)} values and "
                f"{weight.index.kept} kept entries; a changed mask needs a new version"
            )
        return PreparedSparse(weight, layout, self.products)


def layout_of(weight: SparseWeight) -> SparseLayout:
    """Return the layout of a weight's mask."""
    shape = matrix_shape(weight.shape)
    row_starts, columns = weight.index.rows_and_columns(*shape)
    return SparseLayout.of(row_starts, columns, shape)


class SparseSizes(Protocol):
    """What decides the sizes of a sparse weight's gradient."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def values(self) -> torch.Tensor: ...

    @property
    def dense_gradient(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class EmptySparse:
    """A sparse weight without memory, with all the entries that its mask may keep.

    It stands for the weight in a run without arithmetic. `beside_bytes` are those of the mask that
    is streamed with it, or of what a device makes of it.
    """

    name: str
    shape: tuple[int, ...]
    values: torch.Tensor
    beside_bytes: int
    dense_gradient: bool

    @classmethod
    def of(cls, spec: WeightSpec, dense_gradient: bool, is_expanded: bool = False) -> EmptySparse:
        """Return the largest weight that a specification allows.

        If it `is_expanded` on a device, the device has the mask already.
        """
        values = torch.empty(spec.capacity, dtype=spec.stream_dtype, device="meta")
        if is_expanded:
            shape = matrix_shape(spec.shape)
            beside = expanded_bytes(shape, spec.capacity, spec.stream_dtype)
        else:
            beside = max_bytes(spec.capacity, spec.elements)
        return cls(spec.name, spec.shape, values, beside, dense_gradient)


def gradient_shape(weight: SparseSizes) -> tuple[int, ...]:
    """Return the shape of a sparse weight's gradient: of the entries, or of all elements."""
    return weight.shape if weight.dense_gradient else tuple(weight.values.shape)


def dense_gradient_bytes(weight: SparseSizes) -> int:
    """Return the bytes of a weight's gradient beyond those of its entries' gradient, while it is
    computed."""
    if not weight.dense_gradient:
        return 0
    elements, values = math.prod(weight.shape), weight.values
    return extra_gradient_bytes(elements, values.numel(), values.itemsize)


class _WithBytes(Protocol):
    @property
    def beside_bytes(self) -> int: ...


def beside_bytes(weight: SparseWeight | _WithBytes) -> int:
    """Return the bytes that a weight takes besides its values while its stage computes: those of
    the mask that is streamed with it, or of what a device makes of it."""
    return weight.index.nbytes if isinstance(weight, SparseWeight) else weight.beside_bytes


def most_layout_bytes(program: Program) -> int:
    """Return the most bytes of all layouts that an engine keeps for a program, and of making
    one."""
    making = (
        max_building_bytes(matrix_shape(program.weights[name].shape), use.capacity)
        for name, use in program.sparse_weights.items()
    )
    return _layout_bytes(program, max_layout_bytes) + max(making, default=0)


def expected_layout_bytes(program: Program) -> int:
    """Return about the bytes of all layouts that an engine keeps for products by sparse kernels."""
    return _layout_bytes(program, usual_layout_bytes)


def _layout_bytes(program: Program, bytes_of: Callable[[tuple[int, int], int], int]) -> int:
    kept = 0
    for name, use in program.sparse_weights.items():
        shape = matrix_shape(program.weights[name].shape)
        choices = max(1, len(use.product_tokens))  # each number of tokens has its own
        kept += choices * bytes_of(shape, use.capacity)
    return kept


def require_sparse_weights(program: Program, sparse: SparseWeights | None) -> None:
    """Reject a program with sparse weights for an engine that has no choices for their products.

    Raises:
        ConfigError: naming a sparse weight.
    """
    names = [name for name, spec in program.weights.items() if spec.is_sparse]
    if names and sparse is None:
        raise ConfigError(
            f"sparsity: expected SparseWeights for the sparse weights of {program.name}, "
            f"{few(names)}, got none; give the engine those of the run"
        )
