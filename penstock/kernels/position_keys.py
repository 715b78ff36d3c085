"""A random key per position, without equal keys: Philox2x32-10.

Salmon, Moraes, Dror & Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. For a fixed key
the function is a bijection of 64-bit counters, so that different positions never have equal keys:
an order by position keys has no ties. `penstock/kernels/philox.py` has the 128-bit form, whose
64-bit parts can be equal.
"""

import numpy as np

from penstock.kernels.arguments import require_flat
from penstock.kernels.compilation import inlined, serial_kernel

# Mixed with a signed integer, a uint64 would become a float64 in a kernel.
_MULTIPLIER = np.uint64(0xD256D193)
_WEYL = np.uint64(0x9E3779B9)
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@inlined
def position_key(position, low, high):
    """In a kernel: the uint64 key of a position under a 64-bit key (uint64 `low` and `high`, of 32
    bits each)."""
    first = np.uint64(position) & _WORD
    second = (np.uint64(position) >> _HALF) ^ high
    key = low
    for _ in range(10):
        product = _MULTIPLIER * first
        first = (product >> _HALF) ^ key ^ second
        second = product & _WORD
        key = (key + _WEYL) & _WORD
    return (first << _HALF) | second


@serial_kernel
def _fill(out, begin, low, high):
    for i in range(out.size):
        out[i] = position_key(begin + i, low, high)


def key_words(key: int) -> tuple[np.uint64, np.uint64]:
    """Return the two 32-bit words of a 64-bit key, as kernels take them.

    Raises:
        ValueError: the key is not from 0 to 2^64 - 1.
    """
    if not 0 <= key < 2**64:
        raise ValueError(f"key: expected 0 to 2^64 - 1, got {key}")
    return np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)


def position_keys(out: np.ndarray, begin: int, key: int) -> None:
    """Fill uint64 `out` `[n]` with the keys of positions `begin` to `begin + n`.

    Raises:
        ValueError: `key` is out of range, or `out` has another type or layout.
    """
    require_flat("keys", out, out.size, np.uint64, write=True)
    _fill(out, begin, *key_words(key))
