"""Dropout masks as a pure function of (key, stream, element): Philox4x32-10.

Salmon, Moraes, Dror & Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. There is no
state: recomputation and replay request the same mask again. A mask does not depend on the number of
threads, nor on the length of the array: a longer mask begins with the shorter one.
"""

import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.blocks import block_bounds, block_count, block_kernel
from penstock.kernels.compilation import inlined
from penstock.kernels.vectors import (
    LANES,
    every_lane,
    first_lanes,
    lane_numbers,
    multiply_high,
    splat,
    store,
)

_M0 = np.uint32(0xD2511F53)
_M1 = np.uint32(0xCD9E8D57)
_W0 = np.uint32(0x9E3779B9)
_W1 = np.uint32(0xBB67AE85)
_GROUP = 4 * LANES  # elements per call


@inlined
def philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds on 16 counters at once: four uint32 vectors in, four random ones out.

    `c0` is the counter's least significant word. `k0` and `k1` are uint32 vectors too.
    """
    for _ in range(10):
        high0 = multiply_high(splat(_M0), c0)
        low0 = splat(_M0) * c0
        high1 = multiply_high(splat(_M1), c2)
        low1 = splat(_M1) * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += splat(_W0)
        k1 += splat(_W1)
    return c0, c1, c2, c3


@inlined
def _words(group, stream0, stream1, k0, k1):
    """Return the 64 random words of one group of 64 elements, as four vectors in the elements'
    order."""
    low = splat(np.uint32((group * LANES) & 0xFFFFFFFF)) + lane_numbers()
    high = splat(np.uint32((group * LANES) >> 32))
    return philox(low, high, splat(stream0), splat(stream1), splat(k0), splat(k1))


@block_kernel(over="out")
def _mask(out, k0, k1, stream0, stream1, limit):
    length = out.size
    for block in prange(block_count(length)):
        first, _, last = block_bounds(block, length)
        whole = last - (last - first) % _GROUP
        bound = splat(limit)
        for i in range(first, whole, _GROUP):
            a, b, c, d = _words(i // _GROUP, stream0, stream1, k0, k1)
            store(out, i, a < bound, every_lane())
            store(out, i + LANES, b < bound, every_lane())
            store(out, i + 2 * LANES, c < bound, every_lane())
            store(out, i + 3 * LANES, d < bound, every_lane())
        if whole < last:
            a, b, c, d = _words(whole // _GROUP, stream0, stream1, k0, k1)
            rest = last - whole
            store(out, whole, a < bound, first_lanes(rest))
            store(out, whole + LANES, b < bound, first_lanes(max(rest - LANES, 0)))
            store(out, whole + 2 * LANES, c < bound, first_lanes(max(rest - 2 * LANES, 0)))
            store(out, whole + 3 * LANES, d < bound, first_lanes(max(rest - 3 * LANES, 0)))


def dropout_mask(out: np.ndarray, key: int, stream: int, keep_probability: float) -> None:
    """Fill `out` with independent draws that are true with `keep_probability`.

    Element `64 g + 16 w + l` is decided by word `w` of the Philox block with the counter
    `16 g + l` (low 64 bits) and `stream` (high 64 bits) under `key`.

    Args:
        out: bool `[n]`, or uint8 `[n]` to be filled with 0 and 1.
        key: 0 to 2^64 - 1, for instance a hash of seed and step.
        stream: 0 to 2^64 - 1; two streams under one key never share a block.
        keep_probability: 0 to 1, met to within 2^-32.

    Raises:
        ValueError: a number is out of its range, or `out` has another type or layout.
    """
    require_flat("mask", out, out.size, np.bool_, np.uint8, write=True)
    if not 0.0 <= keep_probability <= 1.0:
        raise ValueError(f"keep_probability: expected 0 to 1, got {keep_probability}")
    for name, number in (("key", key), ("stream", stream)):
        if not 0 <= number < 2**64:
            raise ValueError(f"{name}: expected 0 to 2^64 - 1, got {number}")
    limit = round(keep_probability * 2**32)
    if limit == 2**32:
        # No 32-bit limit lets every word pass.
        out.fill(1)
        return
    words = (key & 0xFFFFFFFF, key >> 32, stream & 0xFFFFFFFF, stream >> 32, limit)
    _mask(out.view(np.bool_), *map(np.uint32, words))
