"""A hash of all weights: equal for two stores or checkpoints exactly if their weights are
bit-identical.

The hash covers names, shapes and float32 values in the order of the names. Precision, the division
into stages and the storage in memory or files do not affect the hash. For a sparse weight, it
covers the mask and the values of the entries; a weight whose mask keeps every element has the hash
of a dense one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from penstock.store.masters import PIECE_ELEMENTS

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex


def hash_weights(weights: Iterable[tuple[str, tuple[int, ...], Iterable[memoryview]]]) -> str:
    """Return the hash of weights that arrive in the order of their names.

    Args:
        weights: name, shape, and the float32 values in pieces, of every weight.
    """
    digest = xxhash.xxh3_128()
    for name, shape, pieces in weights:
        digest.update(f"{name}\0{list(shape)}\0".encode())
        for piece in pieces:
            digest.update(piece)
    return digest.hexdigest()


def hash_read(
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str, int, int], np.ndarray],
    mask: Callable[[str], PackedIndex | None] = lambda name: None,
) -> str:
    """Return the hash of weights, which are read in pieces.

    Args:
        shapes: of every weight, by name.
        read: returns elements `begin` to `end` of a flattened weight, float32; of a sparse weight,
            entries.
        mask: returns the mask of a sparse weight, and None for a dense one.
    """

    def pieces(name: str, elements: int) -> Iterator[memoryview]:
        index = mask(name)
        if index is not None and index.kept < elements:
            yield memoryview(f"mask of {index.kept} entries\0".encode() + index.to_bytes())
            elements = index.kept
        for begin in range(0, elements, PIECE_ELEMENTS):
            yield read(name, begin, min(begin + PIECE_ELEMENTS, elements)).data

    return hash_weights(
        (name, shape, pieces(name, math.prod(shape))) for name, shape in sorted(shapes.items())
    )
