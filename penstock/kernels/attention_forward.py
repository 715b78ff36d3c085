"""The outputs of attention, and the logarithms that its gradients need."""

import numpy as np
from numba import prange

from penstock.kernels.attention_shape import TILE
from penstock.kernels.attention_tiles import (
    kept_keys,
    masked,
    pack_neighbours,
    read_paired,
    read_rows,
    start_of,
    transpose_rows,
)
from penstock.kernels.compilation import inlined, kernel
from penstock.kernels.exponential import exponential
from penstock.kernels.gradients import store_gradient
from penstock.kernels.tile_products import add_product, numbers_per_element
from penstock.kernels.vectors import (
    LANES,
    every_lane,
    greatest,
    greatest_lane,
    load,
    splat,
    store,
    sum_lanes,
    widened,
)

_LOWEST, _ZERO, _ONE = np.float32(-np.inf), np.float32(0), np.float32(1)


@inlined
def _scale_scores(scores, at, scale, kept):
    """Scale and mask a row of a tile; return its greatest score."""
    highest = splat(_LOWEST)
    for key in range(0, TILE, LANES):
        values = load(scores, at + key, every_lane()) * splat(scale)
        if kept < TILE:
            values = masked(values, kept, key, _LOWEST)
        store(scores, at + key, values, every_lane())
        highest = greatest(highest, values)
    return greatest_lane(highest)


@inlined
def _add_tile_of_softmax(scores, scale, keys, triangle, is_first, statistics, out, size):
    """Turn a tile of products into exponentials of scores, relative to the maximum of each query so
    far.

    Sums and outputs of earlier tiles are scaled down where the maximum has grown. `statistics`: the
    maximum of each query, factors of what earlier tiles gave, and 16 partial sums of each query.
    Several loops, so that no row waits for the maximum of the one before it.
    """
    maxima, factors, sums = statistics
    for row in range(TILE):
        highest = _scale_scores(scores, row * TILE, scale, kept_keys(row, keys, triangle))
        before = maxima[row]
        maximum = max(before, highest)
        maxima[row] = maximum
        factors[row] = before - (_ZERO if maximum == _LOWEST else maximum)
    for row in range(0, TILE, LANES):
        store(factors, row, exponential(load(factors, row, every_lane())), every_lane())
    for row in range(TILE):
        maximum, place = maxima[row], row * LANES
        shift = splat(_ZERO if maximum == _LOWEST else maximum)
        total = splat(_ZERO)
        if not is_first:
            total = load(sums, place, every_lane()) * splat(factors[row])
        for i in range(row * TILE, (row + 1) * TILE, LANES):
            value = exponential(load(scores, i, every_lane()) - shift)
            store(scores, i, value, every_lane())
            total = total + value
        store(sums, place, total, every_lane())
        if not is_first and factors[row] != _ONE:
            factor = splat(factors[row])
            for i in range(row * size, (row + 1) * size, LANES):
                store(out, i, load(out, i, every_lane()) * factor, every_lane())


@inlined
def _write_outputs(rows, maxima, sums, outputs, places, strides, first, queries, size):
    """Divide a tile of outputs by the sums of its queries; write them, and the logarithms."""
    out, logarithms = outputs
    out_at, log_at = places
    for row in range(min(TILE, queries - first)):
        exponentials = sum_lanes(widened(load(sums, row * LANES, every_lane())))
        logarithm = np.float64(maxima[row]) + np.log(exponentials)
        logarithms[log_at + (first + row) * strides[1]] = np.float32(logarithm)
        inverse = splat(np.float32(1 / exponentials))
        for d in range(0, size, LANES):
            value = load(rows, row * size + d, every_lane()) * inverse
            store_gradient(out, out_at + (first + row) * strides[0] + d, value, every_lane())


@kernel
def forward(parts, inputs, strides, outputs, sizes, memory, rows, keys_width, size_width):
    """Compute each thread's heads.

    `sizes`: heads of queries, how many of them share a head of keys, queries, keys, size of a head,
    all heads of all batches, whether attention is causal, scale.
    """
    q, k, v = inputs
    q_strides, k_strides, v_strides, out_strides, log_strides = strides
    heads, group, queries, keys, size, all_heads, is_causal, scale = sizes
    all_keys, all_values, some_rows, all_weights, all_scores, totals, of_queries, all_sums = memory
    tiles, key_tiles = (queries + TILE - 1) // TILE, (keys + TILE - 1) // TILE
    over_size, over_tile = (TILE, TILE, size), (TILE, size, TILE)
    numbers = numbers_per_element(all_keys)
    width, key_count = size // numbers, TILE // numbers
    for index in prange(parts):
        part = np.int64(index)
        kt, vs = all_keys[part], all_values[part]
        raw, qs = some_rows[part, 0], some_rows[part, 1]
        weights, s, o = all_weights[part], all_scores[part], totals[part]
        maxima, factors, sums = of_queries[part, 0], of_queries[part, 1], all_sums[part]
        for head in range(part, all_heads, parts):
            needed = min(key_tiles, tiles) if is_causal else key_tiles
            k_at = start_of(k_strides, heads // group, head // group)
            v_at = start_of(v_strides, heads // group, head // group)
            for tile in range(needed):
                first, at = tile * TILE, tile * TILE * width
                read_rows(k, k_at, k_strides[2], first, keys, size, raw, 0)
                transpose_rows(raw, 0, size, kt, at)
                read_paired(v, v_at, v_strides[2], first, keys, size, raw, vs, at)
            q_at, out_at = start_of(q_strides, heads, head), start_of(out_strides, heads, head)
            log_at = start_of(log_strides, heads, head)
            for tile in range(tiles):
                first = tile * TILE
                read_rows(q, q_at, q_strides[2], first, queries, size, qs, 0)
                maxima[:] = _LOWEST
                for other in range(min(key_tiles, tile + 1) if is_causal else key_tiles):
                    at, is_first = other * TILE * width, other == 0
                    triangle = 1 if is_causal and other == tile else 0
                    kept = min(TILE, keys - other * TILE)
                    add_product(
                        s, 0, qs, 0, width, 1, kt, at, over_size, True, 0, rows, keys_width
                    )  # fmt: skip
                    _add_tile_of_softmax(
                        s, scale, kept, triangle, is_first, (maxima, factors, sums), o, size
                    )
                    pack_neighbours(s, weights)
                    add_product(
                        o, 0, weights, 0, key_count, 1, vs, at, over_tile, is_first, triangle,
                        rows, size_width,
                    )  # fmt: skip
                _write_outputs(
                    o, maxima, sums, outputs, (out_at, log_at), (out_strides[2], log_strides[2]),
                    first, queries, size,
                )  # fmt: skip
