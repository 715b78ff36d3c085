"""Lion in one pass: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023."""

import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.blocks import AHEAD, STRIDE, block_bounds, block_count
from penstock.kernels.compilation import inlined, kernel
from penstock.kernels.gradients import load_gradient
from penstock.kernels.split_master import (
    Weight,
    fetch_weight,
    load_weight,
    require_weight,
    store_weight,
)
from penstock.kernels.vectors import (
    LANES,
    every_lane,
    fetch,
    first_lanes,
    fma,
    load,
    select,
    splat,
    store,
)


@inlined
def _at(weight, gradient, average, scalars, i, lanes):
    scale, blend_rate, average_rate, keep, learning_rate = scalars
    w = load_weight(weight, i, lanes) * splat(keep)
    g = load_gradient(gradient, i, lanes) * splat(scale)
    m = load(average, i, lanes)
    blend = fma(splat(blend_rate), g - m, m)
    zero = splat(np.float32(0))
    # The sign of zero is zero: a weight that nothing pulls stays where it is.
    down = select(zero < blend, splat(learning_rate), zero)
    up = select(blend < zero, splat(learning_rate), zero)
    store_weight(weight, i, w - down + up, lanes)
    store(average, i, fma(splat(average_rate), g - m, m), lanes)


@kernel
def _lion(weight, gradient, average, scalars):
    length = gradient.size
    for block in prange(block_count(length)):
        first, whole, last = block_bounds(block, length)
        for i in range(first, whole, STRIDE):
            fetch_weight(weight, i + AHEAD)
            fetch(gradient, i + AHEAD)
            fetch(average, i + AHEAD)
            for j in range(i, i + STRIDE, LANES):
                _at(weight, gradient, average, scalars, j, every_lane())
        for i in range(whole, last, LANES):
            _at(weight, gradient, average, scalars, i, first_lanes(last - i))


def lion(
    weight: Weight,
    gradient: np.ndarray,
    average: np.ndarray,
    *,
    learning_rate: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    gradient_scale: float = 1.0,
) -> None:
    """Update a weight and its running mean in place.

    Args:
        weight: `(float32 [n],)` or the two uint16 halves `[n]` of a split master.
        gradient: float32 `[n]` or bfloat16 patterns (uint16 `[n]`).
        average: float32 `[n]`, running mean of the gradient (`exp_avg`).
        learning_rate: length of each step: the direction is a sign.
        beta1: share of the old mean in the direction.
        beta2: share of the old mean in the new one.
        weight_decay: decoupled: the weight is multiplied by `1 - learning_rate * weight_decay`.
        gradient_scale: what the gradient is multiplied by first (the clip factor).

    Raises:
        ValueError: an array has another type, length or layout.
    """
    require_weight(weight, gradient.size)
    require_flat("gradient", gradient, gradient.size, np.float32, np.uint16)
    require_flat("exp_avg", average, gradient.size, np.float32, write=True)
    scalars = (
        gradient_scale,
        1 - beta1,
        1 - beta2,
        1 - learning_rate * weight_decay,
        learning_rate,
    )
    _lion(weight, gradient, average, tuple(map(np.float32, scalars)))
