"""The gradients of attention, which make the scores again."""

import numpy as np
from numba import prange

from penstock.kernels.attention_shape import TILE
from penstock.kernels.attention_tiles import (
    kept_keys,
    masked,
    pack_neighbours,
    pack_rows,
    pair_rows,
    read_rows,
    start_of,
    transpose_rows,
    write_rows,
)
from penstock.kernels.compilation import called, inlined, kernel
from penstock.kernels.exponential import exponential
from penstock.kernels.gradients import load_gradient
from penstock.kernels.tile_products import add_product, numbers_per_element
from penstock.kernels.vectors import (
    LANES,
    every_lane,
    fma,
    load,
    splat,
    store,
    sum_lanes,
    widened,
)

_HIGHEST, _ZERO, _ONE = np.float32(np.inf), np.float32(0), np.float32(1)


@inlined
def _gradients_of_scores(scores, gradients, scale, statistics, first, keys, triangle):
    """Turn products into attention weights, and gradients of attention weights into gradients of
    scores."""
    logarithms, dots = statistics
    for row in range(TILE):
        kept = kept_keys(row, keys, triangle)
        logarithm, dot = splat(-logarithms[first + row]), splat(dots[first + row])
        for key in range(0, TILE, LANES):
            at = row * TILE + key
            # Rounded as forward: a fused product would differ by more than 1 for huge scores.
            weight = exponential(load(scores, at, every_lane()) * splat(scale) + logarithm)
            if kept < key + LANES:
                weight = masked(weight, kept, key, _ZERO)
            store(scores, at, weight, every_lane())
            gradient = load(gradients, at, every_lane()) - dot
            store(gradients, at, weight * gradient, every_lane())


@inlined
def _read_numbers(x, at, stride, length, out):
    """Write a number of each query; pad with infinity, which makes the attention weights of padded
    queries 0 (undefined for an infinite key, whose gradients are then undefined too)."""
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


@called
def _read_keys(k, v, places, strides, first, keys, size, tiles):
    """Write a tile of keys, transposed and paired, and of values, transposed."""
    kt, vt, ks, raw = tiles
    read_rows(v, places[1], strides[1], first, keys, size, raw, 0)
    transpose_rows(raw, 0, size, vt, 0)
    read_rows(k, places[0], strides[0], first, keys, size, raw, 0)
    transpose_rows(raw, 0, size, kt, 0)
    pair_rows(raw, 0, size, ks, 0)


@called
def _read_queries(x, at, stride, tiles, queries, size, rows, paired):
    """Write all rows of a head, as they are and paired."""
    width = size // numbers_per_element(rows)
    for tile in range(tiles):
        place = tile * TILE * width
        read_rows(x, at, stride, tile * TILE, queries, size, rows, place)
        pair_rows(rows, place, size, paired, place)


@inlined
def _add_gradients(
    of_queries, of_keys, key_gradients, scores, packed, statistics, at, held, sizes, fresh, scale,
    shape,
):  # fmt: skip
    """Add what a tile of queries and a tile of keys give to the gradients of both.

    `of_queries`: queries and gradients of outputs, as rows and paired, which begin at `at[0]`, and
    gradients of queries, which begin at `at[1]`. `of_keys`: keys and values, transposed, and keys,
    paired. `key_gradients` begin at `held`. `scores`: memory for scores and their gradients.
    `packed`: for weights by rows, for gradients of scores by rows and by neighbours. `sizes`: of a
    head; keys; number of the tile of queries; whether it is a triangle. `fresh`: whether gradients
    of keys, and of queries, are written instead of added to. `shape`: of tiles of products.
    """
    qs, paired_qs, dos, paired_dos, dqs = of_queries
    kt, vt, ks = of_keys
    dks, dvs = key_gradients
    s, ds = scores
    weights, by_rows, by_neighbours = packed
    size, kept, tile, triangle = sizes
    rows, keys_width, size_width = shape
    over_size, over_tile = (TILE, TILE, size), (TILE, size, TILE)
    numbers = numbers_per_element(qs)
    width, neighbours = size // numbers, TILE // numbers
    is_first, by_first = fresh
    add_product(s, 0, qs, at[0], width, 1, kt, 0, over_size, True, 0, rows, keys_width)
    add_product(ds, 0, dos, at[0], width, 1, vt, 0, over_size, True, 0, rows, keys_width)
    _gradients_of_scores(s, ds, scale, statistics, tile * TILE, kept, triangle)
    pack_rows(s, weights)
    pack_rows(ds, by_rows)
    pack_neighbours(ds, by_neighbours)
    add_product(
        dvs, held, weights, 0, 1, TILE, paired_dos, at[0], over_tile, is_first, -triangle,
        rows, size_width,
    )  # fmt: skip
    add_product(
        dks, held, by_rows, 0, 1, TILE, paired_qs, at[0], over_tile, is_first, -triangle,
        rows, size_width,
    )  # fmt: skip
    add_product(
        dqs, at[1], by_neighbours, 0, neighbours, 1, ks, 0, over_tile, by_first, triangle,
        rows, size_width,
    )  # fmt: skip


@kernel
def backward(parts, inputs, strides, outputs, sizes, memory, rows, keys_width, size_width):
    """Compute the gradients of each thread's heads of keys, and of the queries that read them.

    `inputs`: q, k, v, outputs, gradients of outputs, logarithms. `sizes`: as in `forward`.
    """
    q, k, v, out, out_gradient, logarithms = inputs
    q_strides, k_strides, v_strides, o_strides, g_strides, log_strides = strides[:6]
    dq_strides, dk_strides, dv_strides = strides[6:]
    q_gradient, k_gradient, v_gradient = outputs
    heads, group, queries, keys, size, all_heads, is_causal, scale = sizes
    whole_rows, paired_rows, tile_rows, packed, query_rows, key_rows, scores, row_numbers = memory
    tiles, key_tiles = (queries + TILE - 1) // TILE, (keys + TILE - 1) // TILE
    width = size // numbers_per_element(whole_rows)
    for index in prange(parts):
        part = np.int64(index)
        qs, dos, dqs = whole_rows[part, 0], whole_rows[part, 1], query_rows[part]
        paired_qs, paired_dos = paired_rows[part, 0], paired_rows[part, 1]
        kt, vt = tile_rows[part, 0], tile_rows[part, 1]
        raw, ks = tile_rows[part, 2], tile_rows[part, -1]  # one tile in float32
        dks, dvs = key_rows[part, 0], key_rows[part, 1]
        s, ds = scores[0][part], scores[1][part]
        weights, by_rows, by_neighbours = packed[0][part], packed[1][part], packed[2][part]
        sums, dots = row_numbers[part, 0], row_numbers[part, 1]
        # Every thread has whole groups: the heads of queries that share a head of keys.
        for turn in range((all_heads // group - part + parts - 1) // parts * group):
            member = turn % group
            key_head = part + turn // group * parts
            head = key_head * group + member
            q_at, o_at = start_of(q_strides, heads, head), start_of(o_strides, heads, head)
            g_at, log_at = start_of(g_strides, heads, head), start_of(log_strides, heads, head)
            k_at = start_of(k_strides, heads // group, key_head)
            v_at = start_of(v_strides, heads // group, key_head)
            _read_queries(q, q_at, q_strides[2], tiles, queries, size, qs, paired_qs)
            _read_queries(out_gradient, g_at, g_strides[2], tiles, queries, size, dos, paired_dos)
            _read_numbers(logarithms, log_at, log_strides[2], queries, sums)
            dots[:] = _ZERO
            _dots_of_rows(
                out, o_at, o_strides[2], out_gradient, g_at, g_strides[2], size, queries, dots
            )
            for tile in range(key_tiles):
                first = tile * TILE
                _read_keys(
                    k, v, (k_at, v_at), (k_strides[2], v_strides[2]), first, keys, size,
                    (kt, vt, ks, raw),
                )  # fmt: skip
                kept = min(TILE, keys - first)
                begin = min(tile, tiles) if is_causal else 0
                held = first * size if group > 1 else 0  # where gradients of these keys are
                if begin == tiles and member == 0:  # no query attends to these keys
                    dks[held : held + TILE * size] = _ZERO
                    dvs[held : held + TILE * size] = _ZERO
                for other in range(begin, tiles):
                    at, is_first = other * TILE, other == begin and member == 0
                    triangle = 1 if is_causal and other == tile else 0
                    _add_gradients(
                        (qs, paired_qs, dos, paired_dos, dqs), (kt, vt, ks), (dks, dvs), (s, ds),
                        (weights, by_rows, by_neighbours), (sums, dots), (at * width, at * size),
                        held, (size, kept, other, triangle), (is_first, tile == 0), scale,
                        (rows, keys_width, size_width),
                    )  # fmt: skip
                if member == group - 1:
                    dk_at = start_of(dk_strides, heads // group, key_head)
                    dv_at = start_of(dv_strides, heads // group, key_head)
                    to_keys, to_values = dk_strides[2], dv_strides[2]
                    write_rows(dks, held, size, scale, k_gradient, dk_at, to_keys, first, keys)
                    write_rows(dvs, held, size, _ONE, v_gradient, dv_at, to_values, first, keys)
            dq_at = start_of(dq_strides, heads, head)
            for tile in range(tiles):
                first, at = tile * TILE, tile * TILE * size
                write_rows(dqs, at, size, scale, q_gradient, dq_at, dq_strides[2], first, queries)
