"""Attention that executables compute on a CPU with kernels of Penstock.

PyTorch's fused attention reaches a fifth to a half of the rate of dense float32 products on a Zen 5
(`benchmarks/attention.py`). A traced graph has PyTorch's operators. They are replaced in
executables, and costs are counted as those of the operators.

bfloat16 stays with PyTorch where the recorded library of products is "torch", as on processors from
Intel, whose AMX multiplies bfloat16 many times faster. Elsewhere the kernels multiply pairs of
bfloat16, if the processor can and the record does not demand float32, else in float32. The record
and the processor decide, never a timing, so a run that is resumed on such a processor has the same
bits.
"""

from typing import Any

import torch
from torch import Tensor, fx

from penstock.compiler.nodes import arguments_by_name
from penstock.compiler.product_libraries import Products, widens
from penstock.kernels.attention_shape import (
    Shape,
    Tokens,
    has_kernel as has_kernel_of_size,
    memory_bytes,
)

aten = torch.ops.aten

_OPERATOR = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    may_pair: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[batch, heads, queries, size]`, and the logarithms of the sums of
    exponentials, float32 `[batch, heads, queries]`, for the backward pass.

    `may_pair` is that of the kernel. Keys and values may have fewer heads than queries, of which a
    group shares each of them.
    """
    from penstock.kernels import attention as kernels  # loads a compiler

    batch, heads, queries, size = query.shape
    result = torch.empty_like(query)  # with the strides of PyTorch's
    query, key, value = (_with_contiguous_rows(tensor) for tensor in (query, key, value))
    out = result if result.stride(-1) == 1 else torch.empty_like(query)
    logarithms = query.new_empty(batch, queries, heads, dtype=torch.float32).transpose(1, 2)
    kernels.attention(
        tokens_of(query),
        tokens_of(key),
        tokens_of(value),
        tokens_of(out),
        tokens_of(logarithms),
        shape=shape_of(query, key),
        is_causal=is_causal,
        scale=size**-0.5 if scale is None else scale,
        may_pair=may_pair,
    )
    if out is not result:
        result.copy_(out)
    return result, logarithms


def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logarithms: Tensor,
    is_causal: bool,
    scale: float | None,
    may_pair: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    **Arguments:** `gradient` is that of the outputs, `out` and `logarithms` are the results of
    `attention`.
    """
    from penstock.kernels import attention as kernels

    gradient, query, key, value, out = (
        _with_contiguous_rows(tensor) for tensor in (gradient, query, key, value, out)
    )
    gradients = _empty_like(query), _empty_like(key), _empty_like(value)
    of_query, of_key, of_value = (tokens_of(tensor) for tensor in gradients)
    kernels.attention_backward(
        tokens_of(gradient),
        tokens_of(query),
        tokens_of(key),
        tokens_of(value),
        tokens_of(out),
        tokens_of(logarithms),
        (of_query, of_key, of_value),
        shape=shape_of(query, key),
        is_causal=is_causal,
        scale=query.shape[3] ** -0.5 if scale is None else scale,
        may_pair=may_pair,
    )
    return gradients


OPERATORS = {attention: _OPERATOR, attention_backward: _BACKWARD}
"""The operator that each function replaces: its costs are those of the operator."""


def lower_attention(graph: fx.Graph, products: Products) -> None:
    """Replace the operators of attention that the kernels support by calls of the kernels."""
    for function, operator in OPERATORS.items():
        for node in graph.find_nodes(op="call_function", target=operator):
            if not has_kernel(node, products):
                continue
            given = arguments_by_name(node)
            options = (given.get("is_causal", False), given.get("scale"), not widens(products))
            tensors = [value for value in node.args if isinstance(value, fx.Node)]
            node.target, node.args, node.kwargs = function, (*tensors, *options), {}


def kernel_types(products: Products) -> tuple[torch.dtype, ...]:
    """Return the types that the kernels compute; PyTorch computes others."""
    return (torch.float32,) if products == "torch" else (torch.float32, torch.bfloat16)


def has_kernel(node: fx.Node, products: Products) -> bool:
    """Return whether the kernels support a node of one of the operators."""
    given = arguments_by_name(node)
    if given.get("dropout_p", 0.0) or given.get("attn_mask") is not None:
        return False
    query, key, value = (given[name].meta["val"] for name in ("query", "key", "value"))
    return (
        query.device.type == "cpu"
        and query.dtype in kernel_types(products)
        and query.dim() == 4
        and key.shape == value.shape
        and query.numel() > 0
        and key.numel() > 0
        and query.shape[0] == key.shape[0]
        and query.shape[1] % key.shape[1] == 0
        and query.shape[3] == key.shape[3]
        and has_kernel_of_size(query.shape[3])
    )


def attention_scratch_bytes(node: fx.Node, products: Products) -> int:
    """Return the most bytes that a node of attention allocates besides its results; 0 if PyTorch
    computes it.

    A plan does not depend on the number of threads. Operands with scattered rows are copied.
    """
    if node.target not in OPERATORS.values() or not has_kernel(node, products):
        return 0
    given = arguments_by_name(node)
    query, key = given["query"].meta["val"], given["key"].meta["val"]
    held = memory_bytes(
        shape_of(query, key),
        backward=node.target is _BACKWARD,
        may_pair=query.dtype == torch.bfloat16 and not widens(products),
    )
    operands = [value.meta["val"] for value in node.args if isinstance(value, fx.Node)]
    copied = sum(value.nbytes for value in operands if value.dim() == 4 and value.stride(-1) != 1)
    if node.target is _OPERATOR and query.stride(-1) != 1:
        copied += query.nbytes  # outputs, before they are scattered
    return held + copied


def shape_of(query: Tensor, key: Tensor) -> Shape:
    """Return the sizes of attention."""
    batch, heads, queries, size = query.shape
    return Shape(batch, heads, key.shape[1], queries, key.shape[2], size)


def _empty_like(tensor: Tensor) -> Tensor:
    """Return a tensor with the strides of PyTorch's gradients: heads beside each other."""
    batch, heads, length, size = tensor.shape
    return tensor.new_empty(batch, length, heads, size).transpose(1, 2)


def _with_contiguous_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def tokens_of(tensor: Tensor) -> Tokens:
    """Return a tensor's own memory, bfloat16 as patterns."""
    count = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((count,), (1,))
    elements: Any = flat.view(torch.uint16) if tensor.dtype == torch.bfloat16 else flat
    first, second, third = tensor.stride()[:3]
    return Tokens(elements.numpy(), (first, second, third))
