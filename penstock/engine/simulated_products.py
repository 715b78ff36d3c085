"""Products of weights on the simulated mesh: their numbers and their cycles come from there."""

from collections.abc import Iterator

import numpy as np
import torch

from penstock.compiler import ALL_ROWS, GradientPart
from penstock.engine.product_choices import SparseProducts
from penstock.engine.sparse_weights import PreparedSparse
from penstock.sparsity import SparseLayout, SparseWeight, matrix_shape
from penstock.wafer import WaferOptions
from penstock.wafer.closed_form import HIDDEN
from penstock.wafer.programs import (
    Run,
    SimulatedProduct,
    simulate_data_gradient,
    simulate_forward,
    simulate_weight_gradient,
)

_FLOAT_BYTES = 4


class ProductSimulator:
    """Runs products on a mesh, in 32-bit numbers, and adds up their cycles.

    Attributes:
        is_gradient: whether the product that runs now is one of the backward sweep; None in a head,
            whose products say so themselves.
    """

    def __init__(self, options: WaferOptions) -> None:
        self._run = Run(options.mesh, options.core, HIDDEN, element_bytes=_FLOAT_BYTES)
        self._cycles = 0.0
        self.is_gradient: bool | None = False

    def take_cycles(self) -> float:
        """Return the cycles of all products since the last call."""
        cycles, self._cycles = self._cycles, 0.0
        return cycles

    def product(
        self, left: torch.Tensor, right: torch.Tensor, mask: np.ndarray | None = None
    ) -> torch.Tensor:
        """Return `left @ right`, where `right` is a weight: a forward product or a data gradient.

        Args:
            left: [tokens, inner].
            right: [inner, columns].
            mask: its kept entries; None: all.
        """
        weight = _array(right)
        if self.is_gradient:  # dX = dY W, W is [outputs, inputs]
            return self._done(simulate_data_gradient(weight, mask, _array(left), self._run))
        turned = None if mask is None else np.ascontiguousarray(mask.T)
        transposed = np.ascontiguousarray(weight.T)
        return self._done(simulate_forward(transposed, turned, _array(left), self._run))

    def weight_gradient(
        self, gradient: torch.Tensor, x: torch.Tensor, mask: np.ndarray | None = None
    ) -> torch.Tensor:
        """Return dW = dY^T X [outputs, inputs].

        Args:
            gradient: dY [tokens, outputs].
            x: [tokens, inputs].
            mask: entries that are computed, the others are 0; None: all.
        """
        kept = np.ones((gradient.shape[1], x.shape[1]), np.bool_) if mask is None else mask
        return self._done(simulate_weight_gradient(kept, _array(x), _array(gradient), self._run))

    def _done(self, found: SimulatedProduct) -> torch.Tensor:
        self._cycles += found.cycles
        return torch.from_numpy(np.ascontiguousarray(found.numbers, np.float32))


class SimulatedSparse(PreparedSparse):
    """A sparse weight that is multiplied on the mesh."""

    def __init__(
        self,
        weight: SparseWeight,
        layout: SparseLayout,
        products: SparseProducts,
        simulator: ProductSimulator,
    ) -> None:
        super().__init__(weight, layout, products)
        self._simulator = simulator
        self._mask = weight.index.mask().reshape(matrix_shape(weight.shape))

    def gradient(
        self, x: torch.Tensor, gradient: torch.Tensor, transposed: bool, tokens: int | None = None
    ) -> torch.Tensor:
        """Return the gradient of the entries, or of all elements if the store has asked for it."""
        x, gradient = (value.reshape(-1, value.shape[-1]) for value in (x, gradient))
        mask = None
        if not self.dense_gradient:
            mask = np.ascontiguousarray(self._mask.T) if transposed else self._mask
        found = self._simulator.weight_gradient(gradient, x, mask)
        found = found.t().contiguous() if transposed else found
        return found.view(self.shape) if self.dense_gradient else self._selected(found)

    def _product(
        self, rows: torch.Tensor, bias: torch.Tensor | None, transposed: bool, tokens: int
    ) -> torch.Tensor:
        simulator, weight = self._simulator, self.to_dense().view(matrix_shape(self.shape))
        is_head = simulator.is_gradient is None
        if is_head:
            simulator.is_gradient = transposed
        right, mask = (weight, self._mask) if transposed else (weight.t(), self._mask.T)
        found = simulator.product(rows, right, np.ascontiguousarray(mask))
        if is_head:
            simulator.is_gradient = None
        return found if bias is None else found + bias


class SimulatedHead:
    """The dense weight of a fused head [vocabulary, width], multiplied on the mesh."""

    def __init__(self, weight: torch.Tensor, simulator: ProductSimulator) -> None:
        self.vocabulary, self.gradient_dtype = weight.shape[0], weight.dtype
        self._weight, self._simulator = weight, simulator

    def logits(self, hidden: torch.Tensor, step: int) -> torch.Tensor:
        """Return the logits [rows, vocabulary] of hidden states, without bias."""
        self._simulator.is_gradient = False
        return self._simulator.product(hidden, self._weight.t())

    def hidden_gradient(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """Return the gradient of the hidden states [rows, width] from that of the logits."""
        self._simulator.is_gradient = True
        return self._simulator.product(logits, self._weight)

    def weight_gradients(
        self, logits: torch.Tensor, hidden: torch.Tensor, step: int
    ) -> Iterator[GradientPart]:
        """Yield the gradient of the weight from that of the logits."""
        yield ALL_ROWS, self._simulator.weight_gradient(logits, hidden)


def _array(values: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.detach().numpy(), np.float32)
