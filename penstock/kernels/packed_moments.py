"""8-bit moments of sparse weights: groups of up to 256 entries, begun anew in every dense granule.

The random bits of the rounding belong to the granule and the entry's number in it, so that a part
of a weight has the bits of the whole.
"""

import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.blocks import BLOCK_LENGTH, GRANULE
from penstock.kernels.compilation import inlined, kernel
from penstock.kernels.moments import (
    GROUP,
    SIGNED,
    UNSIGNED,
    decoded,
    encode_packed,
    scratch_of,
)
from penstock.kernels.packed_entries import PackedEntries, group_offsets
from penstock.kernels.passes import over_group
from penstock.kernels.vectors import LANES, first_lanes, store

_BLOCK = BLOCK_LENGTH // GRANULE  # granules


@inlined
def packed_blocks(entries):
    """The number of blocks of a packed weight with these entry offsets."""
    return (entries.size - 1 + _BLOCK - 1) // _BLOCK


@inlined
def granules_of(block, entries):
    """Return the first granule of a block, and the one after its last."""
    return block * _BLOCK, min((block + 1) * _BLOCK, entries.size - 1)


@inlined
def over_packed_block(at, weight, gradient, moment, scalars, work, key, position, places, block):
    """In a kernel: update a block of a packed weight with one 8-bit moment, a mean."""
    codes, scales = moment
    entries, groups = places
    first, last = granules_of(block, entries)
    for granule in range(first, last):
        for begin in range(entries[granule], entries[granule + 1], GROUP):
            inside = begin - entries[granule]
            number = groups[granule] + inside // GROUP
            end = packed_group_end(entries, granule, begin)
            mean = (codes, scales, SIGNED, work, scratch_of(block, 0), begin, number)
            over_group(at, weight, gradient, (mean,), scalars, begin, end)
            encode_packed(mean, end - begin, key, position + granule * GRANULE + inside)


def places_of(packed: PackedEntries) -> tuple[np.ndarray, np.ndarray]:
    """Return what a kernel needs of packed entries: the numbers of entries and of groups before
    each granule."""
    return packed.offsets, group_offsets(packed.offsets, GROUP)


def packed_elements(packed: PackedEntries) -> int:
    """Return the dense elements of packed entries, up to a whole granule: the length of their
    scratch."""
    return (packed.offsets.size - 1) * GRANULE


@inlined
def packed_group_end(entries, granule, begin):
    """Return the end of the group that begins at entry `begin` of a granule of a packed weight."""
    return min(begin + GROUP, entries[granule + 1])


@kernel
def _decode_packed(codes, scales, top, entries, groups, values):
    for granule in prange(entries.size - 1):
        number = groups[granule]
        for begin in range(entries[granule], entries[granule + 1], GROUP):
            scale = scales[number + (begin - entries[granule]) // GROUP]
            end = packed_group_end(entries, granule, begin)
            for i in range(begin, end, LANES):
                lanes = first_lanes(min(LANES, end - i))
                store(values, i, decoded(codes, scale, top, i, lanes), lanes)


@kernel
def _encode_packed(codes, scales, top, entries, groups, values, key, position):
    for granule in prange(entries.size - 1):
        number = groups[granule]
        for begin in range(entries[granule], entries[granule + 1], GROUP):
            inside = begin - entries[granule]
            moment = (codes, scales, top, values, begin, begin, number + inside // GROUP)
            count = packed_group_end(entries, granule, begin) - begin
            encode_packed(moment, count, key, position + granule * GRANULE + inside)


def decode_packed(
    moment: tuple[np.ndarray, np.ndarray], is_signed: bool, entry_offsets: np.ndarray
) -> np.ndarray:
    """Return the float32 values `[kept]` of an 8-bit moment of a sparse weight.

    Args:
        moment: codes uint8 `[kept]` and scales float32 `[groups]`.
        is_signed: whether the moment is a mean; a mean of squares has no sign.
        entry_offsets: int64 `[granules + 1]`, those of the mask.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    kept, groups = int(entry_offsets[-1]), group_offsets(entry_offsets, GROUP)
    _require_packed(moment, kept, groups)
    values = np.empty(kept, np.float32)
    top = SIGNED if is_signed else UNSIGNED
    _decode_packed(moment[0], moment[1], top, entry_offsets, groups, values)
    return values


def encode_moment_packed(
    values: np.ndarray,
    moment: tuple[np.ndarray, np.ndarray],
    is_signed: bool,
    entry_offsets: np.ndarray,
    key: np.uint32,
    position: int,
) -> None:
    """Write float32 `values` `[kept]` as an 8-bit moment of a sparse weight.

    `key` and `position`, the dense position of the weight's first element, seed the random
    rounding; the rest is as for `decode_packed`.
    """
    groups = group_offsets(entry_offsets, GROUP)
    require_flat("values of a moment", values, int(entry_offsets[-1]), np.float32)
    _require_packed(moment, values.size, groups)
    top = SIGNED if is_signed else UNSIGNED
    _encode_packed(moment[0], moment[1], top, entry_offsets, groups, values, key, position)


def _require_packed(moment: tuple[np.ndarray, np.ndarray], kept: int, groups: np.ndarray) -> None:
    require_flat("codes", moment[0], kept, np.uint8, write=True)
    require_flat("scales", moment[1], int(groups[-1]), np.float32, write=True)
