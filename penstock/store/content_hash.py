"""A hash of all weights: equal for two stores, or checkpoints, exactly when they agree to the bit.

It covers names, shapes and float32 values in the order of the names; neither the precision nor
how a program is cut, nor whether the weights lie in memory or in files, has a part in it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import xxhash

from penstock.store.masters import PIECE_ELEMENTS


def hash_weights(weights: Iterable[tuple[str, tuple[int, ...], Iterable[memoryview]]]) -> str:
    """Return the hash of weights that come in the order of their names.

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
    shapes: Mapping[str, tuple[int, ...]], read: Callable[[str, int, int], np.ndarray]
) -> str:
    """Return the hash of weights that are read a piece at a time.

    Args:
        shapes: of every weight, by name.
        read: returns elements `begin` to `end` of a flattened weight, float32.
    """

    def pieces(name: str, elements: int) -> Iterator[memoryview]:
        for begin in range(0, elements, PIECE_ELEMENTS):
            yield read(name, begin, min(begin + PIECE_ELEMENTS, elements)).data

    return hash_weights(
        (name, shape, pieces(name, math.prod(shape))) for name, shape in sorted(shapes.items())
    )
