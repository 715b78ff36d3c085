"""The operands of attention, their sizes, and the memory that the kernels take."""

from typing import NamedTuple

import numpy as np

from penstock.kernels.lanes import LANES

TILE = 64
"""Queries and keys of a tile."""
PART = 256
"""Keys of a part, for one query per head."""
PART_NUMBERS = PART + 2 * LANES * LANES
"""Numbers of a part while it is computed: scores, and products of 16 keys, also transposed."""

_CACHE_LINE = 64  # bytes


class Tokens(NamedTuple):
    """A tensor `[batch, heads, length, size]`, whose last dimension is contiguous, or
    `[batch, heads, length]`.

    Attributes:
        elements: float32, or uint16 for bfloat16 patterns, flat.
        strides: elements from one batch, head and token to the next.
    """

    elements: np.ndarray
    strides: tuple[int, int, int]


class Shape(NamedTuple):
    """Sizes of attention. `heads` are those of queries, each group of `heads // key_heads` of which
    reads one head of keys and values; `size` is that of a head."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    size: int


def has_kernel(size: int) -> bool:
    """Return whether heads of this size are whole vectors."""
    return size > 0 and size % LANES == 0


def can_pair(size: int) -> bool:
    """Return whether pairs of the numbers of a head are whole vectors."""
    return size % (2 * LANES) == 0


def memory_bytes(shape: Shape, *, backward: bool, may_pair: bool) -> int:
    """Return the most bytes that the threads allocate, whatever the processor: with `may_pair` the
    greater of two forms. There are at most as many threads as heads, backward as heads of keys."""
    counts = backward_counts if backward else forward_counts
    threads = shape.batch * (shape.key_heads if backward else shape.heads)
    forms = [counts(shape, 1)]
    if may_pair and can_pair(shape.size):
        forms.append(counts(shape, 2))
    return threads * max(sum(4 * n + _CACHE_LINE for own in form for n in own) for form in forms)


def token_memory_bytes(shape: Shape) -> int:
    """Return the bytes that attention of one query per head allocates: for each part of each head
    of keys its memory, for each part of each head a maximum, a sum and outputs; and the queries."""
    parts = -(-shape.keys // PART)
    of_keys = shape.key_heads * parts * PART_NUMBERS
    return 4 * shape.batch * (of_keys + shape.heads * (parts * (shape.size + 2) + shape.size))


def _tiles(length: int) -> int:
    return -(-length // TILE)


def forward_counts(shape: Shape, numbers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the elements that a thread holds forward, in tiles for products and in float32.

    In tiles: keys (transposed) and values of a head; a tile as it is read and one of queries;
    weights, of pairs. In float32: scores, outputs, maxima, factors and sums of a tile's queries.

    Args:
        numbers: of an element of tiles for products: 1, or 2 for pairs.
    """
    tile = TILE * shape.size
    head = _tiles(shape.keys) * tile // numbers
    in_tiles = (head, head, 2 * tile // numbers, _packed(numbers))
    return in_tiles, (TILE * TILE, tile, 2 * TILE, TILE * LANES)


def backward_counts(shape: Shape, numbers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the elements that a thread holds backward, as `forward_counts`.

    In tiles: queries and gradients of outputs of a head, and both paired; tiles of keys and of
    values, transposed, as rows and, of pairs, paired; weights and, in two forms, gradients of
    scores, of pairs. In float32: gradients of queries; gradients of keys and values, of a tile or,
    where several heads add to them, of all; scores; their gradients; two numbers of each query.
    """
    padded, tile = _tiles(shape.queries) * TILE, TILE * shape.size
    rows = 2 * padded * shape.size // numbers
    held = tile if shape.heads == shape.key_heads else _tiles(shape.keys) * tile
    packed = _packed(numbers)
    tiles = (2 + numbers) * tile // numbers
    in_tiles = (rows, rows if numbers == 2 else 0, tiles, packed, packed, packed)
    in_floats = (padded * shape.size, 2 * held, TILE * TILE, TILE * TILE, 2 * padded)
    return in_tiles, in_floats


def _packed(numbers: int) -> int:
    return TILE * TILE // 2 if numbers == 2 else 0
