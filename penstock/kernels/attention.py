"""Scaled dot-product attention and its gradients, without a matrix of scores.

    out = softmax(scale q k^T) v

The method is that of FlashAttention (Dao et al. 2022, arXiv:2205.14135; its second version,
arXiv:2307.08691): scores exist for a tile of 64 queries and 64 keys only, the softmax is computed
while tiles of keys pass by, and the backward pass makes the scores again from the logarithms of the
sums that the forward pass has left.

A thread computes whole heads, and its tiles stay in its caches. Several heads of queries may share
a head of keys and values (grouped-query attention, Ainslie et al. 2023, arXiv:2305.13245); backward
a thread then computes all of them, and their gradients of keys and values are added head after
head.

Everything is computed in float32 and rounded once. But where the processor has a dot product of
bfloat16 pairs, products of bfloat16 heads of a multiple of 32 multiply pairs: attention weights and
gradients of scores are then rounded to bfloat16 too, as is usual, denormals of bfloat16 are taken
for 0, and all sums are float32. The order of each sum depends on the number of tokens and of
sharing heads alone, so the number of threads changes no bit. Without that instruction neither does
the processor, if its C library computes the same logarithms.
"""

from typing import Any

import numba
import numpy as np

from penstock.kernels.arguments import require_flat
from penstock.kernels.attention_backward import backward
from penstock.kernels.attention_forward import forward
from penstock.kernels.attention_shape import (
    TILE,
    Shape,
    Tokens,
    backward_counts,
    can_pair,
    forward_counts,
)
from penstock.kernels.memory import cache_lines
from penstock.kernels.pair_code import has_bfloat16_dot
from penstock.kernels.tile_products import TILE_ROWS, tile_width
from penstock.kernels.vectors import LANES


def attention(
    query: Tokens,
    key: Tokens,
    value: Tokens,
    out: Tokens,
    logarithms: Tokens,
    *,
    shape: Shape,
    is_causal: bool,
    scale: float,
    may_pair: bool = True,
) -> None:
    """Write the outputs of attention, and the logarithms that the backward pass needs.

    Args:
        query: `[batch, heads, queries, size]`, float32 or bfloat16 patterns.
        key, value: `[batch, key_heads, keys, size]`, of the same type.
        out: of the shape and type of `query`.
        logarithms: float32 `[batch, heads, queries]`, the logarithm of the sum of exponentials of
            each query's scores.
        shape: the sizes; that of a head is a multiple of 16.
        is_causal: whether query i attends only to the keys up to i.
        scale: factor of the scores.
        may_pair: whether bfloat16 is multiplied in pairs where the processor can, which rounds the
            weights; else in float32.

    Raises:
        ValueError: a size or an array is not as above.
    """
    over_queries, over_keys = {"query": query, "out": out}, {"key": key, "value": value}
    _check(shape, over_queries, over_keys, logarithms, ("out", "logarithms"))
    parts = min(numba.get_num_threads(), shape.batch * shape.heads)
    numbers = _numbers_per_element(query, shape, may_pair)
    (keys, values, rows, weights), floats = _memory(parts, numbers, forward_counts(shape, numbers))
    scores, totals, of_queries, sums = floats
    weights = weights if numbers == 2 else scores
    forward(
        parts,
        (query.elements, key.elements, value.elements),
        (query.strides, key.strides, value.strides, out.strides, logarithms.strides),
        (out.elements, logarithms.elements),
        _sizes(shape, is_causal, scale),
        (
            keys,
            values,
            rows.reshape(parts, 2, -1),
            weights,
            scores,
            totals,
            of_queries.reshape(parts, 2, -1),
            sums,
        ),
        *_tile_shape(shape.size),
    )


def attention_backward(
    gradient: Tokens,
    query: Tokens,
    key: Tokens,
    value: Tokens,
    out: Tokens,
    logarithms: Tokens,
    gradients: tuple[Tokens, Tokens, Tokens],
    *,
    shape: Shape,
    is_causal: bool,
    scale: float,
    may_pair: bool = True,
) -> None:
    """Write the gradients of queries, keys and values.

    Args:
        gradient: the gradient of the outputs.
        query, key, value, shape, is_causal, scale, may_pair: the arguments of `attention`.
        out, logarithms: the results of `attention`.
        gradients: the gradients of query, key and value, which are written.

    Raises:
        ValueError: a size or an array is not as above.
    """
    written = ("query's gradient", "key's gradient", "value's gradient")
    over_queries = {"gradient": gradient, "query": query, "out": out, written[0]: gradients[0]}
    over_keys = {"key": key, "value": value, written[1]: gradients[1], written[2]: gradients[2]}
    _check(shape, over_queries, over_keys, logarithms, written)
    parts = min(numba.get_num_threads(), shape.batch * shape.key_heads)
    numbers = _numbers_per_element(query, shape, may_pair)
    (rows, paired, tiles, *packed), floats = _memory(
        parts, numbers, backward_counts(shape, numbers)
    )
    query_rows, key_rows, *scores, row_numbers = floats
    if numbers == 1:
        paired, packed = rows, [scores[0], scores[1], scores[1]]
    inputs = (query, key, value, out, gradient, logarithms)
    backward(
        parts,
        tuple(tokens.elements for tokens in inputs),
        tuple(tokens.strides for tokens in (*inputs, *gradients)),
        tuple(tokens.elements for tokens in gradients),
        _sizes(shape, is_causal, scale),
        (
            rows.reshape(parts, 2, -1),
            paired.reshape(parts, 2, -1),
            tiles.reshape(parts, 2 + numbers, -1),
            tuple(packed),
            query_rows,
            key_rows.reshape(parts, 2, -1),
            tuple(scores),
            row_numbers.reshape(parts, 2, -1),
        ),
        *_tile_shape(shape.size),
    )


def _sizes(shape: Shape, is_causal: bool, scale: float) -> tuple[Any, ...]:
    batch, heads, key_heads, *lengths = shape
    return heads, heads // key_heads, *lengths, batch * heads, is_causal, np.float32(scale)


def _numbers_per_element(query: Tokens, shape: Shape, may_pair: bool) -> int:
    """Return 2 if products are made of pairs of patterns, else 1."""
    may_pair = may_pair and query.elements.dtype == np.uint16 and can_pair(shape.size)
    return 2 if may_pair and has_bfloat16_dot() else 1


def _memory(
    parts: int, numbers: int, counts: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return, for each count, so many elements for each thread: for products, and float32."""
    types = (np.uint32 if numbers == 2 else np.float32, np.float32)
    in_tiles, in_floats = (
        [cache_lines(parts * n, kind).reshape(parts, n) for n in own]
        for kind, own in zip(types, counts, strict=True)
    )
    return in_tiles, in_floats


def _tile_shape(size: int) -> tuple[tuple[int, ...], ...]:
    widths = (tile_width(TILE // LANES), tile_width(size // LANES))
    return (0,) * TILE_ROWS, *((0,) * width for width in widths)


def _check(
    shape: Shape,
    over_queries: dict[str, Tokens],
    over_keys: dict[str, Tokens],
    logarithms: Tokens,
    written: tuple[str, ...],
) -> None:
    batch, heads, key_heads, queries, keys, size = shape
    if min(shape) < 1 or size % LANES or heads % key_heads:
        raise ValueError(
            f"attention: expected sizes of at least 1, heads of a multiple of {LANES} and as many "
            f"or a multiple of the heads of keys, got {shape}"
        )
    dtype = next(iter(over_queries.values())).elements.dtype.type
    if dtype not in (np.float32, np.uint16):
        raise ValueError(f"attention: expected float32 or uint16, got {dtype.__name__}")

    def require(name: str, tokens: Tokens, counts: tuple[int, ...], size: int, dtype: type) -> None:
        last = sum((n - 1) * stride for n, stride in zip(counts, tokens.strides, strict=True))
        require_flat(name, tokens.elements, last + size, dtype, write=name in written)

    of_queries, of_keys = (batch, heads, queries), (batch, key_heads, keys)
    require("logarithms", logarithms, of_queries, 1, np.float32)
    for counts, tensors in ((of_queries, over_queries), (of_keys, over_keys)):
        for name, tokens in tensors.items():
            require(name, tokens, counts, size, dtype)
