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

Everything is computed in float32 and rounded once. The order of each sum depends on the number of
tokens and of sharing heads alone, so the number of threads changes no bit. Neither does the
processor, as long as its C library computes the same logarithms.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.attention_shape import TILE, Shape, backward_counts, forward_counts
from penstock.kernels.compilation import inlined, kernel
from penstock.kernels.exponential import exponential
from penstock.kernels.gradients import load_gradient, store_gradient
from penstock.kernels.memory import cache_lines
from penstock.kernels.tile_products import TILE_ROWS, add_product, tile_width
from penstock.kernels.transposition import transpose_floats
from penstock.kernels.vectors import (
    LANES,
    every_lane,
    first_lanes,
    fma,
    greatest,
    greatest_lane,
    load,
    select,
    splat,
    store,
    sum_lanes,
    widened,
)

_LOWEST, _HIGHEST = np.float32(-np.inf), np.float32(np.inf)
_ZERO, _ONE = np.float32(0), np.float32(1)


class Tokens(NamedTuple):
    """A tensor `[batch, heads, length, size]`, whose last dimension is contiguous, or
    `[batch, heads, length]`.

    Attributes:
        elements: float32, or uint16 for bfloat16 patterns, flat.
        strides: elements from one batch, head and token to the next.
    """

    elements: np.ndarray
    strides: tuple[int, int, int]


@inlined
def _start_of(strides, heads, task):
    return task // heads * strides[0] + task % heads * strides[1]


@inlined
def _read_rows(x, at, stride, first, length, size, scale, out, out_at):
    """Write a tile of rows, scaled, to contiguous float32; rows beyond the length are 0."""
    for row in range(TILE):
        place = out_at + row * size
        if first + row < length:
            source = at + (first + row) * stride
            for d in range(0, size, LANES):
                value = load_gradient(x, source + d, every_lane()) * splat(scale)
                store(out, place + d, value, every_lane())
        else:
            for d in range(0, size, LANES):
                store(out, place + d, splat(_ZERO), every_lane())


@inlined
def _write_rows(rows, at, size, scale, x, x_at, stride, first, length):
    for row in range(min(TILE, length - first)):
        for d in range(0, size, LANES):
            value = load(rows, at + row * size + d, every_lane()) * splat(scale)
            store_gradient(x, x_at + (first + row) * stride + d, value, every_lane())


@inlined
def _read_transposed(x, at, stride, first, length, size, rows, out, out_at):
    """Write a tile of rows to `rows`, and as `[size, TILE]` to `out`."""
    _read_rows(x, at, stride, first, length, size, _ONE, rows, 0)
    for row in range(0, TILE, LANES):
        for d in range(0, size, LANES):
            transpose_floats(rows, row * size + d, size, out, out_at + d * TILE + row, TILE)


@inlined
def _kept_keys(row, keys, triangle):
    """Return how many keys of a tile a query attends to."""
    return min(row + 1, keys) if triangle != 0 else keys


@inlined
def _masked(values, kept, key, other):
    """Return the lanes of a vector that begins at a key, with `other` where nothing is kept."""
    lanes = first_lanes(min(max(kept - key, 0), LANES))
    return select(lanes, values, splat(other))


@inlined
def _add_tile_of_softmax(scores, kept_keys, triangle, is_first, maxima, sums, out, size):
    """Turn a tile of scores into exponentials relative to the maximum of each query so far.

    Sums and outputs of earlier tiles are scaled down where the maximum has grown. `sums` has 16
    partial sums for each query.
    """
    for row in range(TILE):
        at = row * TILE
        kept = _kept_keys(row, kept_keys, triangle)
        if kept < TILE:
            for key in range(0, TILE, LANES):
                value = load(scores, at + key, every_lane())
                store(scores, at + key, _masked(value, kept, key, _LOWEST), every_lane())
        a = load(scores, at, every_lane())
        b = load(scores, at + LANES, every_lane())
        c = load(scores, at + 2 * LANES, every_lane())
        d = load(scores, at + 3 * LANES, every_lane())
        highest = greatest_lane(greatest(greatest(a, b), greatest(c, d)))
        before = maxima[row]
        maximum = max(before, highest)
        maxima[row] = maximum
        shift = splat(_ZERO if maximum == _LOWEST else maximum)
        a, b = exponential(a - shift), exponential(b - shift)
        c, d = exponential(c - shift), exponential(d - shift)
        store(scores, at, a, every_lane())
        store(scores, at + LANES, b, every_lane())
        store(scores, at + 2 * LANES, c, every_lane())
        store(scores, at + 3 * LANES, d, every_lane())
        total = (a + b) + (c + d)
        place = row * LANES
        if is_first:
            store(sums, place, total, every_lane())
        else:
            factor = exponential(splat(before) - shift)
            store(sums, place, fma(load(sums, place, every_lane()), factor, total), every_lane())
            if before != maximum:
                for i in range(row * size, (row + 1) * size, LANES):
                    store(out, i, load(out, i, every_lane()) * factor, every_lane())


@kernel
def _forward(parts, inputs, strides, outputs, sizes, memory, rows, keys_width, size_width):
    """Compute each thread's heads.

    `sizes`: heads of queries, how many of them share a head of keys, queries, keys, size of a head,
    all heads of all batches, whether attention is causal, scale.
    """
    q, k, v = inputs
    q_strides, k_strides, v_strides, out_strides, log_strides = strides
    out, logarithms = outputs
    heads, group, queries, keys, size, all_heads, is_causal, scale = sizes
    transposed_keys, values, natural, query, scores, total, maxima, sums = memory
    tiles, key_tiles = (queries + TILE - 1) // TILE, (keys + TILE - 1) // TILE
    for index in prange(parts):
        part = np.int64(index)
        kt, vs = transposed_keys[part], values[part]
        raw, qs, s, o = natural[part], query[part], scores[part], total[part]
        highest, added = maxima[part], sums[part]
        for head in range(part, all_heads, parts):
            needed = min(key_tiles, tiles) if is_causal else key_tiles
            k_at = _start_of(k_strides, heads // group, head // group)
            v_at = _start_of(v_strides, heads // group, head // group)
            for tile in range(needed):
                at = tile * TILE * size
                _read_transposed(k, k_at, k_strides[2], tile * TILE, keys, size, raw, kt, at)
                _read_rows(v, v_at, v_strides[2], tile * TILE, keys, size, _ONE, vs, at)
            for tile in range(tiles):
                q_at = _start_of(q_strides, heads, head)
                _read_rows(q, q_at, q_strides[2], tile * TILE, queries, size, scale, qs, 0)
                highest[:] = _LOWEST
                for other in range(min(key_tiles, tile + 1) if is_causal else key_tiles):
                    at = other * TILE * size
                    over_size, over_tile = (TILE, TILE, size), (TILE, size, TILE)
                    add_product(
                        s, 0, qs, 0, size, 1, kt, at, over_size, True, 0, rows, keys_width
                    )  # fmt: skip
                    triangle = 1 if is_causal and other == tile else 0
                    kept = min(TILE, keys - other * TILE)
                    is_first = other == 0
                    _add_tile_of_softmax(s, kept, triangle, is_first, highest, added, o, size)
                    add_product(
                        o, 0, s, 0, TILE, 1, vs, at, over_tile, is_first, triangle, rows, size_width
                    )  # fmt: skip
                out_at = _start_of(out_strides, heads, head)
                log_at = _start_of(log_strides, heads, head)
                for row in range(min(TILE, queries - tile * TILE)):
                    exponentials = sum_lanes(widened(load(added, row * LANES, every_lane())))
                    token = tile * TILE + row
                    logarithm = np.float64(highest[row]) + np.log(exponentials)
                    logarithms[log_at + token * log_strides[2]] = np.float32(logarithm)
                    inverse = splat(np.float32(1 / exponentials))
                    for d in range(0, size, LANES):
                        value = load(o, row * size + d, every_lane()) * inverse
                        place = out_at + token * out_strides[2] + d
                        store_gradient(out, place, value, every_lane())


@inlined
def _gradients_of_scores(scores, gradients, logarithms, dots, first, kept_keys, triangle):
    """Turn scores into attention weights, and gradients of attention weights into gradients of
    scores."""
    for row in range(TILE):
        kept = _kept_keys(row, kept_keys, triangle)
        logarithm, dot = splat(logarithms[first + row]), splat(dots[first + row])
        for key in range(0, TILE, LANES):
            at = row * TILE + key
            weight = exponential(load(scores, at, every_lane()) - logarithm)
            if kept < key + LANES:
                weight = _masked(weight, kept, key, _ZERO)
            store(scores, at, weight, every_lane())
            gradient = load(gradients, at, every_lane()) - dot
            store(gradients, at, weight * gradient, every_lane())


@inlined
def _read_numbers(x, at, stride, length, out):
    """Write a number of each query; pad with infinity, which makes the attention weights of padded
    queries 0."""
    for token in range(out.size):
        out[token] = x[at + token * stride] if token < length else _HIGHEST


@inlined
def _dots_of_rows(x, x_at, x_stride, y, y_at, y_stride, size, length, dots):
    """Write the dot product of each row of two matrices."""
    for row in range(length):
        total = splat(_ZERO)
        for d in range(0, size, LANES):
            left = load_gradient(x, x_at + row * x_stride + d, every_lane())
            right = load_gradient(y, y_at + row * y_stride + d, every_lane())
            total = fma(left, right, total)
        dots[row] = np.float32(sum_lanes(widened(total)))


@inlined
def _add_gradients(
    of_queries, of_keys, key_gradients, scores, numbers, at, held, sizes, fresh, rows, keys_width,
    size_width,
):  # fmt: skip
    """Add what a tile of queries and a tile of keys give to the gradients of both.

    `of_queries`: queries, gradients of outputs and of queries, which begin at `at`. `of_keys`: keys
    and values, transposed, and keys. `key_gradients` begin at `held`. `scores`: memory for scores
    and their gradients. `sizes`: of a head; keys; number of the tile of queries; whether it is a
    triangle. `fresh`: whether gradients of keys, and of queries, are written instead of added to.
    """
    qs, dos, dqs = of_queries
    kt, vt, ks = of_keys
    dks, dvs = key_gradients
    s, ds = scores
    size, kept, tile, triangle = sizes
    over_size, over_tile = (TILE, TILE, size), (TILE, size, TILE)
    add_product(s, 0, qs, at, size, 1, kt, 0, over_size, True, 0, rows, keys_width)
    add_product(ds, 0, dos, at, size, 1, vt, 0, over_size, True, 0, rows, keys_width)
    _gradients_of_scores(s, ds, numbers[0], numbers[1], tile * TILE, kept, triangle)
    is_first, by_first = fresh
    add_product(
        dvs, held, s, 0, 1, TILE, dos, at, over_tile, is_first, -triangle, rows, size_width
    )  # fmt: skip
    add_product(
        dks, held, ds, 0, 1, TILE, qs, at, over_tile, is_first, -triangle, rows, size_width
    )  # fmt: skip
    add_product(
        dqs, at, ds, 0, TILE, 1, ks, 0, over_tile, by_first, triangle, rows, size_width
    )  # fmt: skip


@kernel
def _backward(parts, inputs, strides, outputs, sizes, memory, rows, keys_width, size_width):
    """Compute the gradients of each thread's heads of keys, and of the queries that read them.

    `inputs`: q, k, v, outputs, gradients of outputs, logarithms. `sizes`: as in `_forward`.
    """
    q, k, v, out, out_gradient, logarithms = inputs
    q_strides, k_strides, v_strides, o_strides, g_strides, log_strides = strides[:6]
    dq_strides, dk_strides, dv_strides = strides[6:]
    q_gradient, k_gradient, v_gradient = outputs
    heads, group, queries, keys, size, all_heads, is_causal, scale = sizes
    whole_rows, tile_rows, key_rows, tile_scores, row_numbers = memory
    tiles, key_tiles = (queries + TILE - 1) // TILE, (keys + TILE - 1) // TILE
    for index in prange(parts):
        part = np.int64(index)
        qs, dos, dqs = whole_rows[part, 0], whole_rows[part, 1], whole_rows[part, 2]
        kt, vt = tile_rows[part, 0], tile_rows[part, 1]
        ks, raw = tile_rows[part, 2], tile_rows[part, 3]
        dks, dvs = key_rows[part, 0], key_rows[part, 1]
        s, ds = tile_scores[part, 0], tile_scores[part, 1]
        sums, dots = row_numbers[part, 0], row_numbers[part, 1]
        # Every thread has whole groups: the heads of queries that share a head of keys.
        for turn in range((all_heads // group - part + parts - 1) // parts * group):
            member = turn % group
            key_head = part + turn // group * parts
            head = key_head * group + member
            q_at, o_at = _start_of(q_strides, heads, head), _start_of(o_strides, heads, head)
            g_at, log_at = _start_of(g_strides, heads, head), _start_of(log_strides, heads, head)
            k_at = _start_of(k_strides, heads // group, key_head)
            v_at = _start_of(v_strides, heads // group, key_head)
            for tile in range(tiles):
                first, at = tile * TILE, tile * TILE * size
                _read_rows(q, q_at, q_strides[2], first, queries, size, scale, qs, at)
                _read_rows(out_gradient, g_at, g_strides[2], first, queries, size, _ONE, dos, at)
            _read_numbers(logarithms, log_at, log_strides[2], queries, sums)
            dots[:] = _ZERO
            _dots_of_rows(
                out, o_at, o_strides[2], out_gradient, g_at, g_strides[2], size, queries, dots
            )
            for tile in range(key_tiles):
                first = tile * TILE
                _read_transposed(k, k_at, k_strides[2], first, keys, size, ks, kt, 0)
                _read_transposed(v, v_at, v_strides[2], first, keys, size, raw, vt, 0)
                kept = min(TILE, keys - first)
                begin = min(tile, tiles) if is_causal else 0
                held = first * size if group > 1 else 0  # where gradients of these keys are
                if begin == tiles and member == 0:  # no query attends to these keys
                    dks[held : held + TILE * size] = _ZERO
                    dvs[held : held + TILE * size] = _ZERO
                for other in range(begin, tiles):
                    at, is_first = other * TILE * size, other == begin and member == 0
                    triangle = 1 if is_causal and other == tile else 0
                    _add_gradients(
                        (qs, dos, dqs), (kt, vt, ks), (dks, dvs), (s, ds), (sums, dots), at, held,
                        (size, kept, other, triangle), (is_first, tile == 0), rows, keys_width,
                        size_width,
                    )  # fmt: skip
                if member == group - 1:
                    dk_at = _start_of(dk_strides, heads // group, key_head)
                    dv_at = _start_of(dv_strides, heads // group, key_head)
                    to_keys, to_values = dk_strides[2], dv_strides[2]
                    _write_rows(dks, held, size, _ONE, k_gradient, dk_at, to_keys, first, keys)
                    _write_rows(dvs, held, size, _ONE, v_gradient, dv_at, to_values, first, keys)
            dq_at = _start_of(dq_strides, heads, head)
            for tile in range(tiles):
                first, at = tile * TILE, tile * TILE * size
                _write_rows(dqs, at, size, scale, q_gradient, dq_at, dq_strides[2], first, queries)


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

    Raises:
        ValueError: a size or an array is not as above.
    """
    over_queries, over_keys = {"query": query, "out": out}, {"key": key, "value": value}
    _check(shape, over_queries, over_keys, logarithms, ("out", "logarithms"))
    parts = min(numba.get_num_threads(), shape.batch * shape.heads)
    _forward(
        parts,
        (query.elements, key.elements, value.elements),
        (query.strides, key.strides, value.strides, out.strides, logarithms.strides),
        (out.elements, logarithms.elements),
        _sizes(shape, is_causal, scale),
        _memory(parts, forward_counts(shape)),
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
) -> None:
    """Write the gradients of queries, keys and values.

    Args:
        gradient: the gradient of the outputs.
        query, key, value, shape, is_causal, scale: the arguments of `attention`.
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
    rows, tiles, key_rows, scores, numbers = _memory(parts, backward_counts(shape))
    inputs = (query, key, value, out, gradient, logarithms)
    _backward(
        parts,
        tuple(tokens.elements for tokens in inputs),
        tuple(tokens.strides for tokens in (*inputs, *gradients)),
        tuple(tokens.elements for tokens in gradients),
        _sizes(shape, is_causal, scale),
        (
            rows.reshape(parts, 3, -1),
            tiles.reshape(parts, 4, -1),
            key_rows.reshape(parts, 2, -1),
            scores.reshape(parts, 2, -1),
            numbers.reshape(parts, 2, -1),
        ),
        *_tile_shape(shape.size),
    )


def _sizes(shape: Shape, is_causal: bool, scale: float) -> tuple[Any, ...]:
    batch, heads, key_heads, *lengths = shape
    return heads, heads // key_heads, *lengths, batch * heads, is_causal, np.float32(scale)


def _memory(parts: int, counts: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Return, for each count, so many numbers for each thread."""
    return tuple(cache_lines(parts * n, np.float32).reshape(parts, n) for n in counts)


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
