"""Operators that the compiler puts into graphs in place of slower or nondeterministic ones.

They are registered once under the `penstock` namespace with shape rules and gradients, so that
autograd traces them like built-in operators. `penstock.kernels` contains the arithmetic of the CPU
versions; on other devices plain PyTorch operators compute the same.

`torch.library.custom_op` would register them in fewer lines, but the first call of such an operator
imports torch._dynamo, which takes seconds.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.compiler import (
    cached_attention,
    fused_head,
    keyed_dropout,
    onednn_products,
    recurrent_layer as recurrent,
    token_products,
)

_LIBRARY = torch.library.Library("penstock", "FRAGMENT")


def _registered(name: str, function: Callable[..., Any]) -> torch._ops.OpOverload:
    """Register a function without side effects as an operator, for all devices."""
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    operator: torch._ops.OpOverload = getattr(torch.ops.penstock, name).default
    return operator


linear_cross_entropy = _registered("linear_cross_entropy", fused_head.loss_sum)
linear_cross_entropy_predictions = _registered(
    "linear_cross_entropy_predictions", fused_head.loss_sum_and_predictions
)
linear_cross_entropy_backward = _registered("linear_cross_entropy_backward", fused_head.gradients)
linear_cross_entropy_turn = _registered(
    "linear_cross_entropy_turn", fused_head.loss_sum_and_gradients
)
dropout = _registered("dropout", keyed_dropout.dropout)
onednn_linear = _registered("onednn_linear", onednn_products.linear)
token_linear = _registered("token_linear", token_products.linear)
with_row = _registered("with_row", cached_attention.with_row)
attention_at_position = _registered("attention_at_position", cached_attention.attention_at_position)
recurrent_layer = _registered("recurrent_layer", recurrent.outputs)
recurrent_layer_backward = _registered("recurrent_layer_backward", recurrent.gradients)


@torch.library.register_fake(linear_cross_entropy)
def _(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden.new_empty((), dtype=torch.float32)


@torch.library.register_fake(linear_cross_entropy_predictions)
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty((), dtype=torch.float32), torch.empty_like(labels)


def _gradients_like(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    like = (hidden, weight) if bias is None else (hidden, weight, bias)
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in like]


@torch.library.register_fake(linear_cross_entropy_backward)
def _(
    scale: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    with_weight: bool,
    products: str = "torch",
) -> list[Tensor]:
    grads = _gradients_like(hidden, weight, bias)
    return grads if with_weight else grads[:1]


@torch.library.register_fake(linear_cross_entropy_turn)
def _(
    scale: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    with_weight: bool,
    products: str = "torch",
) -> list[Tensor]:
    grads = _gradients_like(hidden, weight, bias)
    loss = hidden.new_empty((), dtype=torch.float32)
    return [loss, *(grads if with_weight else grads[:1])]


def _save_head(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # The library is chosen in the traced graph (`matmul_backend.py`), after autograd.
    hidden, weight, bias, labels, ctx.ignore_index, _ = inputs
    ctx.save_for_backward(hidden, weight, bias, labels)


def _head_backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, labels = ctx.saved_tensors
    with_weight = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    grads = linear_cross_entropy_backward(
        scale, hidden, weight, bias, labels, ctx.ignore_index, with_weight
    )
    by_place: list[Tensor | None] = [*grads, None, None][:3]
    return (*by_place, None, None, None)


torch.library.register_autograd(linear_cross_entropy, _head_backward, setup_context=_save_head)


@torch.library.register_fake(dropout)
def _(value: Tensor, key: Tensor, number: int, probability: float) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _save_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, key, ctx.number, ctx.probability = inputs
    ctx.save_for_backward(key)


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # Dropout multiplies by a mask that depends only on the key, so it is its own gradient.
    (key,) = ctx.saved_tensors
    return dropout(grad, key, ctx.number, ctx.probability), None, None, None


torch.library.register_autograd(dropout, _dropout_backward, setup_context=_save_dropout)


@torch.library.register_fake(onednn_linear)
@torch.library.register_fake(token_linear)
def _(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[0]))


@torch.library.register_fake(with_row)
def _(kept: Tensor, row: Tensor, dim: int, position: Tensor) -> Tensor:
    return torch.empty_like(kept)


@torch.library.register_fake(attention_at_position)
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.register_fake(recurrent_layer)
def _(
    mode: str, values: Tensor, states: list[Tensor], *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    directions, rows, hidden = states[0].shape
    made = values.new_empty(values.shape[0], rows, directions * hidden)
    ends = [values.new_empty(state.shape) for state in states]
    return (made, *ends) if mode == "lstm" else (made, *ends, values.new_empty(0))  # type: ignore[return-value]


@torch.library.register_fake(recurrent_layer_backward)
def _(
    mode: str, values: Tensor, states: list[Tensor], weights: list[Tensor], *_: Any
) -> list[Tensor]:
    given = (values, *states, *weights)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in given]


def _save_layer(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mode, values, states, weights, *ctx.options = inputs
    ctx.count = len(states)
    ctx.save_for_backward(values, *states, *weights)


def _layer_backward(ctx: Any, *of_outputs: Tensor) -> tuple[Any, ...]:
    values, *rest = ctx.saved_tensors
    states, weights = rest[: ctx.count], rest[ctx.count :]
    of_values, *others = recurrent_layer_backward(
        ctx.mode, values, states, weights, *ctx.options, list(of_outputs)
    )
    return None, of_values, others[: ctx.count], others[ctx.count :], None, None


torch.library.register_autograd(recurrent_layer, _layer_backward, setup_context=_save_layer)
