"""The functions that executables call for sparse weights.

They take the engine's object with values and mask in the place of the weight, and call its
products. A graph that is traced has the operators of `sparse_ops.py` instead.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from penstock.compiler.fused_head import ALL_ROWS, GradientPart, Head


class SparseOperand(Protocol):
    """A sparse weight in an engine.

    `tokens` selects how a product is computed, if that is not decided by the tokens of the call:
    all chunks of a head are computed alike.
    """

    shape: tuple[int, ...]

    def multiply(
        self, x: Tensor, bias: Tensor | None, transposed: bool, tokens: int | None = None
    ) -> Tensor:
        """Return `x W^T + bias`, or `x W + bias` if `transposed`; `x` is [..., features]."""
        ...

    def gradient(
        self, x: Tensor, gradient: Tensor, transposed: bool, tokens: int | None = None
    ) -> Tensor:
        """Return the gradient of the entries, float32 [kept], from inputs and outputs' gradient;
        of all elements, in the weight's shape, if the store has asked for it."""
        ...

    def to_dense(self) -> Tensor:
        """Return the weight expanded."""
        ...

    def entries(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the entries, as `gradient` does, from that of the expanded
        weight."""
        ...


def sparse_linear(
    x: Tensor, weight: SparseOperand, bias: Tensor | None, transposed: bool
) -> Tensor:
    """Return `x W^T + bias`, or `x W + bias` if `transposed`."""
    return weight.multiply(x, bias, transposed)


def sparse_weight_gradient(
    x: Tensor, gradient: Tensor, weight: SparseOperand, transposed: bool
) -> Tensor:
    """Return the gradient of a weight from the inputs and the gradient of the outputs."""
    return weight.gradient(x, gradient, transposed)


def sparse_to_dense(weight: SparseOperand) -> Tensor:
    """Return a weight expanded, with zeros where its mask keeps nothing."""
    return weight.to_dense()


def sparse_entries(gradient: Tensor, weight: SparseOperand) -> Tensor:
    """Return the gradient of a weight from that of the expanded weight."""
    return weight.entries(gradient)


class _SparseHead:
    """The weight of a fused head."""

    gradient_dtype = torch.float32

    def __init__(self, weight: SparseOperand) -> None:
        self.vocabulary = weight.shape[0]
        self._weight = weight

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        return self._weight.multiply(hidden, None, False, step)

    def hidden_gradient(self, logits: Tensor, step: int) -> Tensor:
        return self._weight.multiply(logits, None, True, step)

    def weight_gradients(self, logits: Tensor, hidden: Tensor, step: int) -> Iterator[GradientPart]:
        yield ALL_ROWS, self._weight.gradient(hidden, logits, False, step)


def linear_cross_entropy(
    hidden: Tensor,
    weight: SparseOperand,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    products: str = "torch",
) -> Tensor:
    """Return the sum of the losses of a head with a sparse weight (`fused_head.py`)."""
    return Head(hidden, _SparseHead(weight), bias, labels, ignore_index).loss_sum()


def linear_cross_entropy_predictions(
    hidden: Tensor,
    weight: SparseOperand,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    products: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Return also each token's most likely label."""
    head = Head(hidden, _SparseHead(weight), bias, labels, ignore_index)
    return head.loss_sum_and_predictions()


def linear_cross_entropy_backward(
    scale: Tensor,
    hidden: Tensor,
    weight: SparseOperand,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    with_weight: bool,
    products: str = "torch",
) -> list[Tensor]:
    """Return the gradients of hidden, weight and bias (if any)."""
    head = Head(hidden, _SparseHead(weight), bias, labels, ignore_index)
    return head.loss_sum_and_gradients(scale, with_weight)[1:]


def linear_cross_entropy_turn(
    scale: Tensor,
    hidden: Tensor,
    weight: SparseOperand,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    with_weight: bool,
    products: str = "torch",
) -> list[Tensor]:
    """Return the sum of the losses and the gradients, from one pass over the logits."""
    head = Head(hidden, _SparseHead(weight), bias, labels, ignore_index)
    return head.loss_sum_and_gradients(scale, with_weight)
