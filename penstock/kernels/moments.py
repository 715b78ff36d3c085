"""Moments of the optimizers: float32, or 8 bits per element with a scale per 256 elements.

An 8-bit moment is a small floating-point number: the code is the leading bits of a float32 whose
exponent was shifted, so encoding is an addition and a shift. A running mean has a sign, 4 bits of
exponent and 3 of mantissa (16 binades); a running mean of squares has no sign, 5 bits of exponent
and 3 of mantissa (32 binades, 16 in its root). The scale maps the greatest magnitude of 256
adjacent elements to the greatest code. Blockwise scales are those of Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", 2022.

Rounding is stochastic: up with the probability of the remainder. With rounding to the nearest, a
mean that changes by less than half a code step per update would never change; with beta 0.999 this
is the usual case. The random bits are a hash of the weight, the step and the element, so they do
not depend on the place or the order of the update.

Range. A mean of squares above zero never becomes zero, since the update divides by its root: a
value that is too small for its group's scale becomes the smallest code, and the smallest code is
never zero for any scale. The range therefore extends to float32's smallest number, 2^-149; a
smaller square is too small for float32 moments as well. Means of a group whose greatest is below
2^-100 become zero, which moves no weight. Values above 1.875 * 2^126, including infinity, become
1.875 * 2^126, and the other elements of the group keep their values. A NaN becomes the greatest
code. Gradients that are not finite are refused before any update; where an overflow makes a NaN,
AdamW and SGD make the weight NaN too, which no checkpoint accepts.
"""

import struct
from typing import Any

import numba
import numpy as np
import xxhash
from numba.extending import overload

from penstock.kernels.arguments import require_flat
from penstock.kernels.blocks import BLOCK_LENGTH
from penstock.kernels.compilation import inlined
from penstock.kernels.packed_entries import PackedEntries, group_offsets
from penstock.kernels.vectors import (
    LANES,
    bits_of,
    fetch,
    first_lanes,
    from_bits,
    greatest,
    greatest_lane,
    lane_numbers,
    load,
    select,
    shift_left,
    shift_right,
    splat,
    store,
)

GROUP = 256
"""Elements that share a scale."""

Moment = np.ndarray | tuple[np.ndarray, np.ndarray]
"""float32 `[n]`, or codes uint8 `[n]` and their scales float32 `[ceil(n / 256)]`."""

ReadMoment = tuple[np.ndarray]
"""A moment float32 `[n]` that a kernel reads and does not change."""

_MANTISSA = 20  # mantissa bits of a float32 that a code omits
_TOP = np.float32(1.875)  # the value of the greatest code, before the scale
_TOP_BITS = 0x3FF00000
_LEAST = np.float32(2.0**-100)  # means whose greatest in a group is below this count as zero
_LEAST_SCALE = np.float32(2.0**-118)  # code 1 of a mean of squares is then 1.125 * 2^-149
_GREATEST_SCALE = np.float32(2.0**126)  # its inverse is a normal number
SIGNED, UNSIGNED = 127, 255
"""The greatest code of a mean, beside its sign, and of a mean of squares."""


def require_moment(
    name: str, moment: Moment, length: int, packed: PackedEntries | None = None
) -> None:
    """Reject an argument that is not a `Moment` of `length` elements, or entries if `packed`.

    Raises:
        ValueError: naming the part, the expected and the actual value.
    """
    if isinstance(moment, np.ndarray):
        require_flat(name, moment, length, np.float32, write=True)
        return
    codes, scales = moment
    groups = -(-length // GROUP)
    if packed is not None:
        groups = int(group_offsets(packed.offsets, GROUP)[-1])
    require_flat(f"codes of {name}", codes, length, np.uint8, write=True)
    require_flat(f"scales of {name}", scales, groups, np.float32, write=True)


def only_read(moment: Moment) -> ReadMoment:
    """Return a float32 moment as kernels take it that only read it.

    **Raises:** `ValueError` if it has 8 bits.
    """
    if not isinstance(moment, np.ndarray):
        raise ValueError("new weights without an update need moments of float32, got 8 bits")
    return (moment,)


def load_moment(moment: Any, index: Any, lanes: Any) -> Any:
    """In a kernel: 16 float32 values of a moment from `index` on."""
    raise TypeError("load_moment works only inside a kernel")


def store_moment(moment: Any, index: Any, value: Any, lanes: Any) -> Any:
    """In a kernel: write 16 float32 values to a moment; 8-bit moments stay in scratch until
    `encode`."""
    raise TypeError("store_moment works only inside a kernel")


# Inside a kernel an 8-bit moment is (codes, scales, greatest code, scratch, its first element). In
# a packed weight, whose groups begin anew in every granule, the first element of the group and the
# number of its scale follow (`packed_moments.py`).
_PACKED = 7


def _is_only_read(moment: Any) -> bool:
    return isinstance(moment, numba.types.BaseTuple) and len(moment) == 1


def fetch_moment(moment: Any, index: Any) -> Any:
    """In a kernel: prefetch 32 values of a float32 moment from `index` on into the cache."""
    raise TypeError("fetch_moment works only inside a kernel")


@overload(fetch_moment, jit_options={"forceinline": True})
def _fetch_moment(moment, index):
    if _is_only_read(moment):
        return lambda moment, index: fetch(moment[0], index)
    return lambda moment, index: fetch(moment, index)


@overload(load_moment, jit_options={"forceinline": True})
def _load_moment(moment, index, lanes):
    if isinstance(moment, numba.types.Array):
        return lambda moment, index, lanes: load(moment, index, lanes)
    if _is_only_read(moment):
        return lambda moment, index, lanes: load(moment[0], index, lanes)
    if len(moment) == _PACKED:
        return lambda moment, index, lanes: decoded(
            moment[0], moment[1][moment[6]], moment[2], index, lanes
        )
    return lambda moment, index, lanes: decoded(
        moment[0], moment[1][index // GROUP], moment[2], index, lanes
    )


@overload(store_moment, jit_options={"forceinline": True})
def _store_moment(moment, index, value, lanes):
    if isinstance(moment, numba.types.Array):
        return lambda moment, index, value, lanes: store(moment, index, value, lanes)
    if _is_only_read(moment):
        return lambda moment, index, value, lanes: None

    if len(moment) == _PACKED:

        def write_packed(moment, index, value, lanes):
            store(moment[3], moment[4] + index - moment[5], value, lanes)

        return write_packed

    def write(moment, index, value, lanes):
        scratch, first = moment[3], moment[4]
        store(scratch, first + index % GROUP, value, lanes)

    return write


@inlined
def decoded(codes, scale, top, index, lanes):
    """In a kernel: 16 values of an 8-bit moment from `index` on, whose group has this scale."""
    code = load(codes, index, lanes)
    magnitude = code & splat(np.uint32(top))
    base = splat(np.uint32(_TOP_BITS - (top << _MANTISSA)))
    zero = splat(np.float32(0))
    value = from_bits(shift_left(magnitude, _MANTISSA) + base) * splat(scale)
    value = select(magnitude < splat(np.uint32(1)), zero, value)
    sign = shift_left(code & splat(np.uint32(255 - top)), 24)
    return from_bits(bits_of(value) | sign)


@inlined
def _magnitude(value):
    return from_bits(bits_of(value) & splat(np.uint32(0x7FFFFFFF)))


@inlined
def scratch_of(block, which):
    """Return the offset of a block's scratch for its moment number `which`."""
    return (2 * block + which) * GROUP


def scratch(length: int) -> np.ndarray:
    """Return the scratch of a kernel over `length` elements: a group of two moments per block."""
    return np.empty(2 * GROUP * max(1, -(-length // BLOCK_LENGTH)), np.float32)


def rounding_keys(key: int, step: int) -> tuple[np.uint32, np.uint32]:
    """Return the seeds of the random rounding of a weight's two moments in a step."""
    digest = xxhash.xxh3_64_intdigest(struct.pack("<QQ", key, step))
    return np.uint32(digest & 0xFFFFFFFF), np.uint32(digest >> 32)


@inlined
def noise(key, index):
    """Return 32 random bits for each of the 16 elements from `index` on: MurmurHash3's
    finaliser."""
    x = (splat(np.uint32(index)) + lane_numbers()) ^ splat(key)
    x = x * splat(np.uint32(0x9E3779B1))
    x = (x ^ shift_right(x, 16)) * splat(np.uint32(0x85EBCA6B))
    x = (x ^ shift_right(x, 13)) * splat(np.uint32(0xC2B2AE35))
    return x ^ shift_right(x, 16)


@inlined
def encode(moment, begin, length, key, position):
    """Encode the values of the group from `begin` on, which are in the scratch.

    `position + begin` seeds the random bits of the group's first element.
    """
    count = min(GROUP, length - begin)
    _encode_group(moment, begin, count, begin // GROUP, key, position + begin)


@inlined
def encode_packed(moment, count, key, position):
    """Encode the `count` values of a group of a packed weight, which are in the scratch.

    `position` seeds the random bits of the group's first element.
    """
    _encode_group(moment, moment[5], count, moment[6], key, position)


@inlined
def _encode_group(moment, begin, count, number, key, position):
    codes, scales, top, scratch, first = moment[0], moment[1], moment[2], moment[3], moment[4]
    most = splat(np.float32(0))
    for i in range(0, count, LANES):
        lanes = first_lanes(min(LANES, count - i))
        most = greatest(_magnitude(load(scratch, first + i, lanes)), most)
    most_of_all = greatest_lane(most)
    scale, inverse = np.float32(0), np.float32(0)
    if most_of_all >= _LEAST or (top == UNSIGNED and most_of_all > 0):
        scale = min(max(most_of_all / _TOP, _LEAST_SCALE), _GREATEST_SCALE)
        inverse = np.float32(1) / scale
    scales[number] = scale
    base = np.uint32(_TOP_BITS - (top << _MANTISSA))
    least = from_bits(splat(np.uint32(base + (1 << _MANTISSA))))
    one, greatest_code = splat(np.uint32(1)), splat(np.uint32(top))
    none = splat(np.uint32(0))
    for i in range(0, count, LANES):
        lanes = first_lanes(min(LANES, count - i))
        value = load(scratch, first + i, lanes)
        bits = noise(key, position + i)
        scaled = _magnitude(value) * splat(inverse)
        # Between two codes the float32's own bits are the remainder: add, then truncate.
        dither = shift_right(bits, 32 - _MANTISSA)
        code = shift_right(bits_of(scaled) - splat(base) + dither, _MANTISSA)
        code = select(greatest_code < code, greatest_code, code)
        # Below the smallest code: the smallest code or zero, with the probability that keeps the
        # mean.
        share = from_bits(shift_right(bits, 9) | splat(np.uint32(0x3F800000)))
        chance = (share - splat(np.float32(1))) * least
        if top == UNSIGNED:
            below = select(splat(np.float32(0)) < value, one, none)  # `scaled` may have underflowed
        else:
            below = select(chance < scaled, one, none)
        code = select(scaled < least, below, code)
        sign = shift_right(bits_of(value), 24) & splat(np.uint32(255 - top))
        store(codes, begin + i, code | sign, lanes)
