"""A pseudo-random permutation of n things, computed one place at a time.

A Feistel network over a rectangle of about n cells is a bijection of its cells whatever its round
function is; places that fall outside of n walk on until they fall inside (cycle walking), which
keeps it a bijection. Nothing is stored, so a sampler has no state to save.

Source: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (the generalised
Feistel method). The round function is splitmix64's finaliser (G. Steele et al., OOPSLA 2014).
"""

import math

import numpy as np

ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def mix(values: np.ndarray) -> np.ndarray:
    """Scramble uint64 values elementwise by a bijection."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def key_of(*parts: int) -> int:
    """Return 64 bits that depend on every part and on their order."""
    state = _GOLDEN
    for part in parts:
        for word in (part & _MASK, (part >> 64) & _MASK):
            state = _mix_one(((state ^ word) + _GOLDEN) & _MASK)
    return state


def _mix_one(value: int) -> int:
    """`mix` of a single value; many times faster than an array of length 1."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permute(places: np.ndarray, n: int, key: int) -> np.ndarray:
    """Return the elements at `places` of the permutation of 0 ... n-1 that belongs to `key`.

    Args:
        places: int64 of any shape, each in [0, n).
        n: number of things, 1 to 2^62.
        key: 64 bits; each key selects a permutation.

    Returns:
        int64 of the same shape, each in [0, n).
    """
    if n == 1:
        return np.zeros_like(places)
    height = math.isqrt(n - 1) + 1
    width = -(-n // height)
    rounds = [np.uint64(key_of(key, number)) for number in range(ROUNDS)]
    cells = places.astype(np.uint64).ravel()
    todo = np.arange(cells.size)
    while todo.size:
        walked = _network(cells[todo], height, width, rounds)
        cells[todo] = walked
        todo = todo[walked >= n]
    return cells.astype(np.int64).reshape(places.shape)


def _network(cells: np.ndarray, height: int, width: int, rounds: list[np.uint64]) -> np.ndarray:
    row, column = cells // np.uint64(width), cells % np.uint64(width)
    for number, key in enumerate(rounds):
        # Reduced before the sum, which must not overflow 2^64.
        if number % 2 == 0:
            np.add(row, mix(column ^ key) % np.uint64(height), out=row)
            np.remainder(row, np.uint64(height), out=row)
        else:
            np.add(column, mix(row ^ key) % np.uint64(width), out=column)
            np.remainder(column, np.uint64(width), out=column)
    return row * np.uint64(width) + column
