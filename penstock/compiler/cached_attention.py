"""Attention of one position of a text over the kept keys and values of all (`decoding.py`).

A traced graph adds a position to the kept keys or values by an operator without side effects.
Executables write it into them: the engine's inputs with kept values are there to be written.

For bfloat16 on a CPU the attention has a kernel of its own: PyTorch's takes up to six times as long
for one query (`docs/decisions.md`).
"""

from typing import Any

import torch
from torch import Tensor, fx

from penstock.compiler.attention_calls import shape_of, tokens_of
from penstock.compiler.tensors import elements_of
from penstock.kernels.attention_shape import has_kernel, token_memory_bytes

_BLOCK_OF_KEYS = 512  # whose scores a thread of PyTorch's fused attention holds


def with_row(kept: Tensor, row: Tensor, dim: int, position: Tensor) -> Tensor:
    """Return kept keys or values with those of a position.

    **Arguments:** `row` has one index in dimension `dim`, which counts positions; `position` int64
    [1].
    """
    return kept.index_copy(dim, position, row)


def write_row(kept: Tensor, row: Tensor, dim: int, position: Tensor) -> Tensor:
    """Write into kept keys or values those of a position; return all of them."""
    return kept.index_copy_(dim, position, row)


def lower_writes(graph: fx.Graph) -> None:
    """Let nodes that add a position to kept keys or values write into them."""
    operator = torch.ops.penstock.with_row.default
    for node in graph.find_nodes(op="call_function", target=operator):
        node.target = write_row


def attention_at_position(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position: Tensor,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return the attention of a position to itself and those before it.

    **Arguments:** `query` [..., heads, 1, size]; `key` and `value` [..., heads, window, size], of
    fewer heads if groups of queries share them; `mask` broadcasts to [..., heads, 1, window], None
    if every position before is visible; `position` int64 [1].
    """
    if key.device.type == "cpu":
        visible = int(position) + 1
        if mask is not None and mask.shape[-1] == key.shape[-2]:
            mask = mask.narrow(-1, 0, visible)
        key, value = key.narrow(-2, 0, visible), value.narrow(-2, 0, visible)
        if mask is None and _has_kernel(query, key, value):
            return _attend(query, key, value, scale)
    elif mask is None:  # reading the position would wait for the device
        mask = visible_positions(key, position)
    return _attention(query, key, value, mask, scale, enable_gqa)


def visible_positions(key: Tensor, position: Tensor) -> Tensor:
    """Return the mask of a position over the window, bool [1, window]."""
    return (torch.arange(key.shape[-2], device=key.device) <= position).unsqueeze(0)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    *before, heads, _, size = query.shape
    if enable_gqa and heads != key.shape[-3]:  # queries that share keys are rows of one product
        groups = key.shape[-3]
        query = query.reshape(*before, groups, heads // groups, size)
        if mask is not None and mask.dim() > 2 and mask.shape[-3] == heads:
            mask = mask.reshape(*mask.shape[:-3], groups, heads // groups, mask.shape[-1])
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale
    )
    return out.reshape(*before, heads, 1, value.shape[-1])


def scratch_bytes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: Any) -> int:
    """Return the most bytes that attention at a position allocates besides its result."""
    if query.device.type != "cpu":
        return 0
    if mask is None and _has_kernel(query, key, value):
        return token_memory_bytes(shape_of(query, key))
    scores = 4 * query.numel() // query.shape[-1] * key.shape[-2]
    mask_bytes = 0 if mask is None else 2 * scores  # added as numbers, of every head
    if query.dim() == 4 and query.shape[-1] == value.shape[-1]:
        heads = query.numel() // query.shape[-1]
        return mask_bytes + 4 * heads * (_BLOCK_OF_KEYS + query.shape[-1])
    # PyTorch then has no fused kernel, and computes in float32.
    return mask_bytes + 4 * (query.numel() + 2 * (key.numel() + value.numel())) + 3 * scores


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return (
        query.dtype == key.dtype == value.dtype == torch.bfloat16
        and query.dim() == 4
        and key.shape == value.shape
        and query.shape[1] % key.shape[1] == 0
        and key.stride(-1) == value.stride(-1) == 1
        and has_kernel(query.shape[-1])
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    from penstock.kernels.token_attention import attend

    scaled = query.float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    out = query.new_empty(query.shape)
    attend(
        elements_of(scaled.contiguous()),
        tokens_of(key),
        tokens_of(value),
        elements_of(out),
        shape=shape_of(query, key),
    )
    return out
