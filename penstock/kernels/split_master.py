"""The split master: a float32 weight as its bfloat16 stream value and a 16-bit remainder.

With `b` the 32 bits of a float32:

    high = (b + 0x8000) >> 16        the nearest bfloat16: what is streamed
    low  = b mod 2^16                what the optimizer needs besides

The pair gives `b` back as `(high << 16) + signed(low)`, modulo 2^32. Proof: write
`b = 2^16 q + r` with `0 <= r < 2^16`. If `r < 0x8000`, then `high = q` and `signed(low) = r`. Else
`high = q + 1` and `signed(low) = r - 2^16`. Both give `2^16 q + r`. Nothing in this depends on what
the bits mean, so the pair is lossless for all 2^32 patterns: subnormals, both zeros, infinities and
NaNs.

**Ties go away from zero**, not to even as in `torch.Tensor.bfloat16`. Both are nearest values, and
they differ only where a weight lies exactly midway between two bfloat16 numbers and the lower of
these is even (one pattern in 131072). No lossless pair can do otherwise: under ties-to-even each
even `high` is the rounding of 65537 different floats (32767 on each side, itself, and both ties),
and 16 bits of `low` can tell only 65536 apart.

As in any rounding to bfloat16, a finite float beyond the greatest bfloat16 (about 3.39e38) has
`high` = infinity; the pair still holds the finite value. An infinity streams as itself. The NaN
that arithmetic makes (0x7FC00000 of either sign) streams as NaN; a NaN with a hand-made payload
may stream as an infinity or a zero, which is why non-finite gradients are refused before they
reach a weight.
"""

from typing import Any

import numba
import numpy as np
from numba import prange
from numba.extending import overload

from penstock.kernels.arguments import require_flat
from penstock.kernels.blocks import STRIDE, block_bounds, block_count, block_kernel
from penstock.kernels.compilation import inlined
from penstock.kernels.vectors import (
    LANES,
    bits_of,
    every_lane,
    fetch,
    first_lanes,
    from_bits,
    load,
    shift_left,
    shift_right,
    sign_extend_half,
    splat,
    store,
)

Weight = tuple[np.ndarray, ...]
"""A weight in the store: `(float32 master,)` or `(high uint16, low uint16)`; all flat. An array
after these, of the type of the first, is where a kernel writes the streamed values of a weight that
stays as it is (`streamed_to`)."""


@inlined
def _joined(high, low):
    return from_bits(shift_left(high, 16) + sign_extend_half(low))


@inlined
def _high(value):
    return shift_right(bits_of(value) + splat(np.uint32(0x8000)), 16)


def load_weight(weight: Any, index: Any, lanes: Any) -> Any:
    """In a kernel: 16 float32 values of a `Weight` from `index` on."""
    raise TypeError("load_weight works only inside a kernel")


def store_weight(weight: Any, index: Any, value: Any, lanes: Any) -> Any:
    """In a kernel: write 16 float32 values to a `Weight` from `index` on."""
    raise TypeError("store_weight works only inside a kernel")


def fetch_weight(weight: Any, index: Any) -> Any:
    """In a kernel: prefetch 32 values of a `Weight` from `index` on into the cache."""
    raise TypeError("fetch_weight works only inside a kernel")


def _is_split(weight: Any) -> bool:
    return len(weight) > 1 and weight.types[0].dtype == numba.types.uint16


def _has_target(weight: Any) -> bool:
    return len(weight) == (3 if _is_split(weight) else 2)


@overload(load_weight, jit_options={"forceinline": True})
def _load_weight(weight, index, lanes):
    if _is_split(weight):
        return lambda weight, index, lanes: _joined(
            load(weight[0], index, lanes), load(weight[1], index, lanes)
        )
    return lambda weight, index, lanes: load(weight[0], index, lanes)


@overload(store_weight, jit_options={"forceinline": True})
def _store_weight(weight, index, value, lanes):
    if _is_split(weight):
        if _has_target(weight):
            return lambda weight, index, value, lanes: store(weight[2], index, _high(value), lanes)

        def write(weight, index, value, lanes):
            store(weight[0], index, _high(value), lanes)
            store(weight[1], index, bits_of(value), lanes)

        return write
    if _has_target(weight):
        return lambda weight, index, value, lanes: store(weight[1], index, value, lanes)
    return lambda weight, index, value, lanes: store(weight[0], index, value, lanes)


@overload(fetch_weight, jit_options={"forceinline": True})
def _fetch_weight(weight, index):
    if _is_split(weight):

        def fetch_both(weight, index):
            fetch(weight[0], index)
            fetch(weight[1], index)

        return fetch_both
    return lambda weight, index: fetch(weight[0], index)


@inlined
def _copy_at(source, destination, i, lanes):
    store_weight(destination, i, load_weight(source, i, lanes), lanes)


@block_kernel(over="source")
def _copy(source, destination):
    length = source[0].size
    for block in prange(block_count(length)):
        first, whole, last = block_bounds(block, length)
        for i in range(first, whole, STRIDE):
            for j in range(i, i + STRIDE, LANES):
                _copy_at(source, destination, j, every_lane())
        for i in range(whole, last, LANES):
            _copy_at(source, destination, i, first_lanes(last - i))


def require_weight(weight: Weight, length: int, write: bool = True) -> None:
    """Reject an argument that is not a `Weight` of `length` elements.

    Raises:
        ValueError: naming the part, the expected and the actual value.
    """
    if len(weight) == 2:
        require_flat("high half of the weight", weight[0], length, np.uint16, write=write)
        require_flat("low half of the weight", weight[1], length, np.uint16, write=write)
    else:
        require_flat("weight", weight[0], length, np.float32, write=write)


def streamed_to(weight: Weight, target: np.ndarray, length: int) -> Weight:
    """Return a `Weight` of `length` elements of which kernels write only the streamed values, to
    `target`: float32 or uint16 `[length]`, as the first part of the weight.

    **Raises:** `ValueError` if the target has another type, length or layout.
    """
    require_flat("streamed values", target, length, weight[0].dtype.type, write=True)
    return (*weight, target)


def split(master: np.ndarray, high: np.ndarray, low: np.ndarray) -> None:
    """Write float32 `master` `[n]` as its halves `high` and `low`, uint16 `[n]`.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    require_weight((master,), master.size, write=False)
    require_weight((high, low), master.size)
    _copy((master,), (high, low))


def join(high: np.ndarray, low: np.ndarray, master: np.ndarray) -> None:
    """Write to float32 `master` `[n]` the value that `split` had divided into `high` and `low`.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    require_weight((high, low), high.size, write=False)
    require_weight((master,), high.size)
    _copy((high, low), (master,))
