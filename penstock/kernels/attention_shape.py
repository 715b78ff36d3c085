"""The sizes of attention, and the memory that its kernels take."""

from typing import NamedTuple

from penstock.kernels.vectors import LANES

TILE = 64
"""Queries and keys of a tile."""
PART = 256
"""Keys of a part, for one query per head."""
PART_NUMBERS = PART + 2 * LANES * LANES
"""Numbers of a part while it is computed: scores, and products of 16 keys, also transposed."""

_CACHE_LINE = 64  # bytes


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


def memory_bytes(shape: Shape, *, backward: bool) -> int:
    """Return the most bytes that the threads allocate. There are at most as many threads as heads,
    backward as heads of keys."""
    counts = backward_counts(shape) if backward else forward_counts(shape)
    threads = shape.batch * (shape.key_heads if backward else shape.heads)
    return threads * sum(4 * count + _CACHE_LINE for count in counts)


def token_memory_bytes(shape: Shape) -> int:
    """Return the bytes that attention of one query per head allocates: for each part of each head
    of keys its memory, for each part of each head a maximum, a sum and outputs; and the queries."""
    parts = -(-shape.keys // PART)
    of_keys = shape.key_heads * parts * PART_NUMBERS
    return 4 * shape.batch * (of_keys + shape.heads * (parts * (shape.size + 2) + shape.size))


def _tiles(length: int) -> int:
    return -(-length // TILE)


def forward_counts(shape: Shape) -> tuple[int, ...]:
    """Return the numbers that a thread holds forward: keys (transposed) and values of a head; a
    tile as it is read, of queries, scores and outputs; maxima and sums of a tile's queries."""
    head, tile = _tiles(shape.keys) * TILE * shape.size, TILE * shape.size
    return head, head, tile, tile, TILE * TILE, tile, TILE, TILE * LANES


def backward_counts(shape: Shape) -> tuple[int, ...]:
    """Return the numbers that a thread holds backward: queries, gradients of outputs and of queries
    of a head; four tiles of keys and values; gradients of keys and values, of a tile or, where
    several heads add to them, of all; scores and their gradients; two numbers of each query."""
    padded, tile = _tiles(shape.queries) * TILE, TILE * shape.size
    held = tile if shape.heads == shape.key_heads else _tiles(shape.keys) * tile
    return 3 * padded * shape.size, 4 * tile, 2 * held, 2 * TILE * TILE, 2 * padded
