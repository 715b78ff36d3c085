"""A hash of all weights: equal for two stores, or checkpoints, exactly when they agree to the bit.

It covers names, shapes and float32 values in the order of the names; neither the precision nor
how a program is cut, nor whether the weights lie in memory or in files, has a part in it.
"""

from collections.abc import Iterable

import xxhash


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
