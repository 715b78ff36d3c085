"""Lion in one pass: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023."""

import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.blocks import block_bounds, block_count, block_kernel
from penstock.kernels.compilation import inlined
from penstock.kernels.gradients import load_gradient
from penstock.kernels.moments import (
    GROUP,
    SIGNED,
    Moment,
    encode,
    load_moment,
    only_read,
    require_moment,
    rounding_keys,
    scratch,
    scratch_of,
    store_moment,
)
from penstock.kernels.packed_entries import PackedEntries
from penstock.kernels.packed_moments import (
    over_packed_block,
    packed_blocks,
    packed_elements,
    places_of,
)
from penstock.kernels.passes import over_block, over_group
from penstock.kernels.split_master import (
    Weight,
    load_weight,
    require_weight,
    store_weight,
    streamed_to,
)
from penstock.kernels.vectors import (
    fma,
    select,
    splat,
)


@inlined
def _at(weight, gradient, moments, scalars, i, lanes):
    average = moments[0]
    scale, blend_rate, average_rate, keep, learning_rate = scalars
    w = load_weight(weight, i, lanes) * splat(keep)
    g = load_gradient(gradient, i, lanes) * splat(scale)
    m = load_moment(average, i, lanes)
    blend = fma(splat(blend_rate), g - m, m)
    zero = splat(np.float32(0))
    # The sign of zero is zero: a weight without gradient and mean does not move.
    down = select(zero < blend, splat(learning_rate), zero)
    up = select(blend < zero, splat(learning_rate), zero)
    store_weight(weight, i, w - down + up, lanes)
    store_moment(average, i, fma(splat(average_rate), g - m, m), lanes)


@block_kernel(over="gradient")
def _lion(weight, gradient, average, scalars):
    for block in prange(block_count(gradient.size)):
        over_block(_at, weight, gradient, (average,), scalars, block)


@block_kernel(over="gradient")
def _lion_8bit(weight, gradient, average, scalars, work, key, position):
    length = gradient.size
    for block in prange(block_count(length)):
        first, _, last = block_bounds(block, length)
        mean = (average[0], average[1], SIGNED, work, scratch_of(block, 0))
        for group in range(first, last, GROUP):
            over_group(_at, weight, gradient, (mean,), scalars, group, last)
            encode(mean, group, length, key, position)


@block_kernel(over="gradient")
def _lion_8bit_packed(weight, gradient, average, scalars, work, key, position, entries, groups):
    places = (entries, groups)
    for block in prange(packed_blocks(entries)):
        over_packed_block(
            _at, weight, gradient, average, scalars, work, key, position, places, block
        )


def lion(
    weight: Weight,
    gradient: np.ndarray,
    average: Moment,
    *,
    step: int,
    learning_rate: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    gradient_scale: float = 1.0,
    key: int = 0,
    position: int = 0,
    packed: PackedEntries | None = None,
    streamed: np.ndarray | None = None,
) -> None:
    """Update a weight and its running mean in place.

    Args:
        weight: `(float32 [n],)` or the two uint16 halves `[n]` of a split master.
        gradient: float32 `[n]` or bfloat16 patterns (uint16 `[n]`).
        average: running mean of the gradient (`exp_avg`).
        step: number of this update, from 1; only the rounding of an 8-bit mean depends on it.
        learning_rate: length of each update, since the direction is a sign.
        beta1: share of the old mean in the direction.
        beta2: share of the old mean in the new one.
        weight_decay: decoupled: the weight is multiplied by `1 - learning_rate * weight_decay`.
        gradient_scale: the factor that is applied to the gradient first (the clip factor).
        key, position: seeds of the random rounding of an 8-bit moment: a number of the weight, and
            the offset of these elements in the weight.
        packed: the entries of a sparse weight, to which the `n` elements belong.
        streamed: where the new streamed values are written (`streamed_to`), while the weight and
            its mean, which must be float32, stay as they are.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    require_weight(weight, gradient.size)
    require_flat("gradient", gradient, gradient.size, np.float32, np.uint16)
    if packed is not None:
        packed.check(gradient.size)
    require_moment("exp_avg", average, gradient.size, packed)
    scalars = (
        gradient_scale,
        1 - beta1,
        1 - beta2,
        1 - learning_rate * weight_decay,
        learning_rate,
    )
    rounded = tuple(map(np.float32, scalars))
    if streamed is not None:
        target = streamed_to(weight, streamed, gradient.size)
        _lion(target, gradient, only_read(average), rounded)
        return
    if isinstance(average, np.ndarray):
        _lion(weight, gradient, average, rounded)
        return
    keys = rounding_keys(key, step)
    if packed is None:
        work = scratch(gradient.size)
        _lion_8bit(weight, gradient, average, rounded, work, keys[0], position)
        return
    work, places = scratch(packed_elements(packed)), places_of(packed)
    _lion_8bit_packed(weight, gradient, average, rounded, work, keys[0], position, *places)
