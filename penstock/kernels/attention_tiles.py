"""Tiles of attention: rows of queries, keys or values in the forms that products read.

Tiles hold float32 numbers or, where the processor multiplies pairs of bfloat16 patterns, words of
two patterns. Pairs lie along the depth of a product. So a tile of rows has three forms:

- rows as they are, a left factor whose depth is the size of a head;
- transposed, a right factor of this depth;
- paired, a right factor whose depth is the rows: the patterns of two rows alternate. In float32 it
  is the rows as they are.

A tile of scores is float32. As a left factor it is packed: into pairs of neighbours, whose depth is
the keys, or of rows, whose depth is the queries. In float32 it is its own packed form.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from penstock.kernels.attention_shape import TILE
from penstock.kernels.bfloat16_pairs import (
    first_alternating,
    last_alternating,
    load_pairs,
    rounded_neighbours,
    rounded_pairs,
)
from penstock.kernels.compilation import called, inlined
from penstock.kernels.gradients import load_gradient, store_gradient
from penstock.kernels.tile_products import numbers_per_element
from penstock.kernels.transposition import transpose_floats
from penstock.kernels.vectors import (
    LANES,
    every_lane,
    first_lanes,
    load,
    select,
    splat,
    store,
)

_ZERO = np.float32(0)
_NO_WORD = np.uint32(0)
_INSIDE: Any = {"forceinline": True}


def pair_rows(rows: Any, rows_at: int, size: int, out: Any, out_at: int) -> None:
    """In a kernel: write the paired form of a tile of rows, or nothing in float32."""
    raise TypeError("pair_rows works only inside a kernel")


def read_paired(
    x: Any,
    at: int,
    stride: int,
    first: int,
    length: int,
    size: int,
    rows: Any,
    out: Any,
    place: int,
) -> None:
    """In a kernel: write the paired form of a tile of rows, as `read_rows`, from `place` of `out`
    on; `rows` is memory for the rows."""
    raise TypeError("read_paired works only inside a kernel")


def pack_neighbours(scores: Any, out: Any) -> None:
    """In a kernel: write a tile of scores as pairs of neighbours, or nothing in float32."""
    raise TypeError("pack_neighbours works only inside a kernel")


def pack_rows(scores: Any, out: Any) -> None:
    """In a kernel: write a tile of scores as pairs of rows, or nothing in float32."""
    raise TypeError("pack_rows works only inside a kernel")


def _read_row(x: Any, source: int, size: int, out: Any, place: int) -> None:
    raise TypeError("_read_row works only inside a kernel")


def _clear_row(size: int, out: Any, place: int) -> None:
    raise TypeError("_clear_row works only inside a kernel")


@overload(_read_row, jit_options=_INSIDE)
def _read_row_as(x, source, size, out, place):
    if out.dtype == types.uint32:

        def copy(x, source, size, out, place):
            for d in range(0, size, 2 * LANES):
                store(out, place + d // 2, load_pairs(x, source + d), every_lane())

        return copy

    def read(x, source, size, out, place):
        for d in range(0, size, LANES):
            store(out, place + d, load_gradient(x, source + d, every_lane()), every_lane())

    return read


@overload(_clear_row, jit_options=_INSIDE)
def _clear_row_of(size, out, place):
    zero, step = (_NO_WORD, 2 * LANES) if out.dtype == types.uint32 else (_ZERO, LANES)

    def clear(size, out, place):
        for d in range(0, size, step):
            store(out, place + d * LANES // step, splat(zero), every_lane())

    return clear


@inlined
def start_of(strides, heads, task):
    """Return the place of a head of all batches."""
    return task // heads * strides[0] + task % heads * strides[1]


@inlined
def kept_keys(row, keys, triangle):
    """Return how many keys of a tile a query attends to."""
    return min(row + 1, keys) if triangle != 0 else keys


@inlined
def masked(values, kept, key, other):
    """Return the lanes of a vector that begins at a key, with `other` where nothing is kept."""
    return select(first_lanes(min(max(kept - key, 0), LANES)), values, splat(other))


@called
def read_rows(x, at, stride, first, length, size, out, out_at):
    """Write a tile of rows as they are; rows beyond the length are 0."""
    width = size // numbers_per_element(out)
    for row in range(TILE):
        place = out_at + row * width
        if first + row < length:
            _read_row(x, at + (first + row) * stride, size, out, place)
        else:
            _clear_row(size, out, place)


@called
def write_rows(rows, at, size, scale, x, x_at, stride, first, length):
    """Write a tile of float32 rows, scaled and rounded, up to the length."""
    for row in range(min(TILE, length - first)):
        for d in range(0, size, LANES):
            value = load(rows, at + row * size + d, every_lane()) * splat(scale)
            store_gradient(x, x_at + (first + row) * stride + d, value, every_lane())


@called
def transpose_rows(rows, rows_at, size, out, out_at):
    """Write the transposed form of a tile of rows."""
    width = size // numbers_per_element(out)
    for row in range(0, TILE, LANES):
        for d in range(0, width, LANES):
            place = out_at + d * TILE + row
            transpose_floats(rows, rows_at + row * width + d, width, out, place, TILE)


@overload(pair_rows, jit_options=_INSIDE)
def _pair_rows(rows, rows_at, size, out, out_at):
    if out.dtype != types.uint32:
        return lambda rows, rows_at, size, out, out_at: None

    def pair(rows, rows_at, size, out, out_at):
        width = size // 2
        for row in range(0, TILE, 2):
            for d in range(0, width, LANES):
                a = load(rows, rows_at + row * width + d, every_lane())
                b = load(rows, rows_at + (row + 1) * width + d, every_lane())
                place = out_at + row * width + 2 * d
                store(out, place, first_alternating(a, b), every_lane())
                store(out, place + LANES, last_alternating(a, b), every_lane())

    return pair


@overload(read_paired, jit_options=_INSIDE)
def _read_paired(x, at, stride, first, length, size, rows, out, place):
    if out.dtype != types.uint32:
        return lambda x, at, stride, first, length, size, rows, out, place: read_rows(
            x, at, stride, first, length, size, out, place
        )

    def read(x, at, stride, first, length, size, rows, out, place):
        read_rows(x, at, stride, first, length, size, rows, 0)
        pair_rows(rows, 0, size, out, place)

    return read


@overload(pack_neighbours, jit_options=_INSIDE)
def _pack_neighbours(scores, out):
    if out.dtype != types.uint32:
        return lambda scores, out: None

    def pack(scores, out):
        for i in range(0, TILE * TILE, 2 * LANES):
            a, b = load(scores, i, every_lane()), load(scores, i + LANES, every_lane())
            store(out, i // 2, rounded_neighbours(a, b), every_lane())

    return pack


@overload(pack_rows, jit_options=_INSIDE)
def _pack_rows(scores, out):
    if out.dtype != types.uint32:
        return lambda scores, out: None

    def pack(scores, out):
        for row in range(0, TILE, 2):
            for key in range(0, TILE, LANES):
                at = row * TILE + key
                a, b = load(scores, at, every_lane()), load(scores, at + TILE, every_lane())
                store(out, row // 2 * TILE + key, rounded_pairs(a, b), every_lane())

    return pack
