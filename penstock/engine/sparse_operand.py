"""A sparse weight as executables compute with it (`penstock.compiler.sparse_calls`).

Activations may have any number of dimensions, and a step may ask for the gradient of every element:
that is the same however products are computed.
"""

from abc import ABC, abstractmethod

import torch

from penstock.sparsity import SparseWeight


class BaseSparseOperand(ABC):
    """A sparse weight whose products a subclass computes, on matrices.

    Args:
        weight: what the store has sent.
    """

    def __init__(self, weight: SparseWeight) -> None:
        self.name, self.shape = weight.name, weight.shape
        self.dense_gradient = weight.dense_gradient

    @property
    @abstractmethod
    def kept_bytes(self) -> int:
        """Bytes that are derived from the mask and stay between stages."""

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        transposed: bool,
        tokens: int | None = None,
    ) -> torch.Tensor:
        """Return `x W^T + bias`, or `x W + bias` if `transposed`; `x` is [..., features]."""
        rows = x.reshape(-1, x.shape[-1])
        y = self._product(rows, bias, transposed, tokens or rows.shape[0])
        return y.view(*x.shape[:-1], y.shape[1])

    def gradient(
        self, x: torch.Tensor, gradient: torch.Tensor, transposed: bool, tokens: int | None = None
    ) -> torch.Tensor:
        """Return the gradient of the entries, float32 [kept], from inputs and outputs' gradient;
        of all elements, in the weight's shape, if the store has asked for it."""
        x, gradient = (value.reshape(-1, value.shape[-1]) for value in (x, gradient))
        of_rows, of_columns = (x, gradient) if transposed else (gradient, x)
        if self.dense_gradient:
            return torch.mm(of_rows.t(), of_columns).float()
        return self._entry_gradient(of_rows, of_columns, tokens or x.shape[0])

    @abstractmethod
    def to_dense(self) -> torch.Tensor:
        """Return the weight expanded, of the type of its values."""

    def entries(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the entries from that of the expanded weight."""
        if self.dense_gradient:
            return gradient.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        return self._selected(gradient)

    @abstractmethod
    def _product(
        self, rows: torch.Tensor, bias: torch.Tensor | None, transposed: bool, tokens: int
    ) -> torch.Tensor:
        """Return the product of `rows` [tokens, features]; `tokens` are those of its choice."""

    @abstractmethod
    def _entry_gradient(
        self, of_rows: torch.Tensor, of_columns: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """Return the gradient of the entries from the factors of the weight's rows and columns."""

    @abstractmethod
    def _selected(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the entries of a dense gradient, float32 [kept]."""
