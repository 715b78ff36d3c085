"""Attention of one query per head over all keys, as for a further token of a text.

    out = softmax(scale q K^T) V

Memory decides the time: keys and values are read once, also by heads of queries that share them.
They are divided into parts of 256 positions, so that few heads occupy all threads; each part has a
maximum, a sum of exponentials and outputs of its own, which are then added in the order of the
parts (Dao et al. 2023, "Flash-Decoding for long-context inference").

Everything is computed in float32 and rounded once. The order of each sum depends on the number of
keys alone, so the number of threads changes no bit.
"""

import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.attention_shape import PART, PART_NUMBERS, Shape, Tokens
from penstock.kernels.compilation import inlined, kernel
from penstock.kernels.exponential import exponential
from penstock.kernels.gradients import load_gradient, store_gradient
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

_SQUARE = LANES * LANES
_LOWEST, _ZERO = np.float32(-np.inf), np.float32(0)


@inlined
def _write_scores(query, query_at, key, key_at, stride, size, count, memory, at):
    """Write the scores of a part's keys; -inf up to a multiple of 16."""
    products, sums = at + PART, at + PART + _SQUARE
    for first in range(0, count, LANES):
        for n in range(min(LANES, count - first)):
            source, total = key_at + (first + n) * stride, splat(_ZERO)
            for d in range(0, size, LANES):
                numbers = load_gradient(key, source + d, every_lane())
                total = fma(numbers, load(query, query_at + d, every_lane()), total)
            store(memory, products + n * LANES, total, every_lane())
        transpose_floats(memory, products, LANES, memory, sums, LANES)
        total = load(memory, sums, every_lane())
        for lane in range(1, LANES):
            total += load(memory, sums + lane * LANES, every_lane())
        lanes = first_lanes(min(LANES, count - first))
        store(memory, at + first, select(lanes, total, splat(_LOWEST)), every_lane())


@inlined
def _write_exponentials(memory, at, count):
    """Turn scores into exponentials relative to their maximum; return it and the sum."""
    highest = splat(_LOWEST)
    for n in range(0, count, LANES):
        highest = greatest(highest, load(memory, at + n, every_lane()))
    maximum = greatest_lane(highest)
    shift, total = splat(_ZERO if maximum == _LOWEST else maximum), splat(_ZERO)
    for n in range(0, count, LANES):
        weight = exponential(load(memory, at + n, every_lane()) - shift)
        store(memory, at + n, weight, every_lane())
        total += weight
    return maximum, np.float32(sum_lanes(widened(total)))


@inlined
def _add_values(memory, at, value, value_at, stride, size, count, outputs, out_at):
    """Write the sum of a part's values, times their exponentials."""
    whole = count // 4 * 4
    for d in range(0, size, LANES):
        a = b = c = e = splat(_ZERO)
        for n in range(0, whole, 4):
            source, place = value_at + n * stride + d, at + n
            a = fma(load_gradient(value, source, every_lane()), splat(memory[place]), a)
            source += stride
            b = fma(load_gradient(value, source, every_lane()), splat(memory[place + 1]), b)
            source += stride
            c = fma(load_gradient(value, source, every_lane()), splat(memory[place + 2]), c)
            source += stride
            e = fma(load_gradient(value, source, every_lane()), splat(memory[place + 3]), e)
        for n in range(whole, count):
            source = value_at + n * stride + d
            a = fma(load_gradient(value, source, every_lane()), splat(memory[at + n]), a)
        store(outputs, out_at + d, (a + b) + (c + e), every_lane())


@kernel
def _attend(query, key, value, strides, sizes, scratch, parts_of_heads, out):
    key_strides, value_strides = strides
    key_heads, group, keys, size, heads, key_parts = sizes
    maxima, sums, outputs = parts_of_heads
    for task in prange(heads // group * key_parts):
        of_heads, part = task // key_parts, task % key_parts
        first = part * PART
        count, at = min(PART, keys - first), np.int64(task) * PART_NUMBERS
        batch, key_head = of_heads // key_heads, of_heads % key_heads
        key_at = batch * key_strides[0] + key_head * key_strides[1] + first * key_strides[2]
        value_at = batch * value_strides[0] + key_head * value_strides[1] + first * value_strides[2]
        for head in range(of_heads * group, (of_heads + 1) * group):
            place = head * key_parts + part
            _write_scores(query, head * size, key, key_at, key_strides[2], size, count, scratch, at)
            maxima[place], sums[place] = _write_exponentials(scratch, at, count)
            _add_values(
                scratch, at, value, value_at, value_strides[2], size, count, outputs, place * size
            )  # fmt: skip
    for head in prange(heads):
        first, maximum, total = np.int64(head) * key_parts, _LOWEST, splat(_ZERO)
        for place in range(first, first + key_parts):
            maximum = max(maximum, maxima[place])
        shift = splat(_ZERO if maximum == _LOWEST else maximum)
        for place in range(first, first + key_parts):
            total = fma(exponential(splat(maxima[place]) - shift), splat(sums[place]), total)
        for d in range(0, size, LANES):
            added = splat(_ZERO)
            for place in range(first, first + key_parts):
                factor = exponential(splat(maxima[place]) - shift)
                added = fma(load(outputs, place * size + d, every_lane()), factor, added)
            store_gradient(out, head * size + d, added / total, every_lane())


def attend(query: np.ndarray, key: Tokens, value: Tokens, out: np.ndarray, *, shape: Shape) -> None:
    """Write the attention of one query per head.

    Args:
        query: float32 `[batch, heads, size]`, flat, times the scale.
        key, value: `[batch, key_heads, keys, size]`, float32 or bfloat16 patterns.
        out: `[batch, heads, size]`, flat, of the type of the keys.
        shape: the sizes, with one query; that of a head is a multiple of 16.

    Raises:
        ValueError: a size or an array is not as above.
    """
    batch, heads, key_heads, queries, keys, size = shape
    if min(shape) < 1 or queries != 1 or size % LANES or heads % key_heads:
        raise ValueError(
            f"attention of a token: expected one query, heads of a multiple of {LANES} and as many "
            f"or a multiple of the heads of keys, got {shape}"
        )
    require_flat("query", query, batch * heads * size, np.float32)
    require_flat("key", key.elements, _length(key, shape), np.float32, np.uint16)
    kind = key.elements.dtype.type
    require_flat("value", value.elements, _length(value, shape), kind)
    require_flat("out", out, batch * heads * size, kind, write=True)
    key_parts = -(-keys // PART)
    places = batch * heads * key_parts
    _attend(
        query,
        key.elements,
        value.elements,
        (key.strides, value.strides),
        (key_heads, heads // key_heads, keys, size, batch * heads, key_parts),
        np.empty(batch * key_heads * key_parts * PART_NUMBERS, np.float32),
        (
            np.empty(places, np.float32),
            np.empty(places, np.float32),
            np.empty(places * size, np.float32),
        ),
        out,
    )


def _length(tokens: Tokens, shape: Shape) -> int:
    counts = (shape.batch, shape.key_heads, shape.keys)
    return shape.size + sum((n - 1) * s for n, s in zip(counts, tokens.strides, strict=True))
