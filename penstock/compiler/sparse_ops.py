"""Operators for products with sparse weights, as autograd and the tracer see them.

In a graph a sparse weight has its dense shape, and so has its gradient. The operators compute that
dense function, on which their gradients rest. Executables do not call them: `sparse_lowering.py`
replaces each by a function over the engine's object with values and mask.
"""

from typing import Any

import torch
from torch import Tensor


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return `x W^T + bias`, or `x W + bias` if `transposed`; `x` is [..., features]."""
    y = x @ (weight if transposed else weight.t())
    return y if bias is None else y + bias


def _weight_gradient(x: Tensor, gradient: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """Return the gradient of the weight for the gradient of the outputs."""
    x, gradient = (value.reshape(-1, value.shape[-1]) for value in (x, gradient))
    return x.t() @ gradient if transposed else gradient.t() @ x


def _to_dense(weight: Tensor) -> Tensor:
    """Return the weight expanded, with zeros where the mask keeps nothing."""
    return weight.clone()


def _entries(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the kept entries from that of the expanded weight."""
    return gradient.clone()


sparse_linear = torch.library.custom_op("penstock::sparse_linear", _linear, mutates_args=())
sparse_weight_gradient = torch.library.custom_op(
    "penstock::sparse_weight_gradient", _weight_gradient, mutates_args=()
)
sparse_to_dense = torch.library.custom_op("penstock::sparse_to_dense", _to_dense, mutates_args=())
sparse_entries = torch.library.custom_op("penstock::sparse_entries", _entries, mutates_args=())


@sparse_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1 if transposed else 0]))


@sparse_weight_gradient.register_fake
def _(x: Tensor, gradient: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


@sparse_to_dense.register_fake
def _(weight: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


@sparse_entries.register_fake
def _(gradient: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.transposed = inputs
    ctx.save_for_backward(x, weight)


def _linear_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x = of_weight = of_bias = None
    if ctx.needs_input_grad[0]:  # the product with the transposed weight
        of_x = sparse_linear(gradient, weight, None, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        of_weight = sparse_weight_gradient(x, gradient, weight, ctx.transposed)
    if ctx.needs_input_grad[2]:
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
    return of_x, of_weight, of_bias, None


sparse_linear.register_autograd(_linear_backward, setup_context=_save_linear)


def _save_weight(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _to_dense_backward(ctx: Any, gradient: Tensor) -> Tensor:
    (weight,) = ctx.saved_tensors
    return sparse_entries(gradient, weight)


sparse_to_dense.register_autograd(_to_dense_backward, setup_context=_save_weight)
