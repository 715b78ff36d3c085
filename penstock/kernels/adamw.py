"""AdamW in one pass: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019.

The arithmetic is that of `torch.optim.AdamW`, operation by operation in float32; scalars are
computed in float64 and rounded once.
"""

import math

import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.blocks import block_bounds, block_count
from penstock.kernels.compilation import inlined, kernel
from penstock.kernels.gradients import load_gradient
from penstock.kernels.moments import (
    GROUP,
    SIGNED,
    UNSIGNED,
    Moment,
    encode,
    load_moment,
    require_moment,
    rounding_keys,
    scratch,
    scratch_of,
    store_moment,
)
from penstock.kernels.passes import over_block, over_group
from penstock.kernels.split_master import (
    Weight,
    load_weight,
    require_weight,
    store_weight,
)
from penstock.kernels.vectors import (
    fma,
    splat,
    square_root,
)


@inlined
def _at(weight, gradient, moments, scalars, i, lanes):
    average, square = moments
    scale, average_rate, square_keep, square_rate, root_scale, epsilon, keep, step_size = scalars
    w = load_weight(weight, i, lanes) * splat(keep)
    g = load_gradient(gradient, i, lanes) * splat(scale)
    m = load_moment(average, i, lanes)
    m = fma(splat(average_rate), g - m, m)
    v = fma(g * g, splat(square_rate), load_moment(square, i, lanes) * splat(square_keep))
    denominator = fma(square_root(v), splat(root_scale), splat(epsilon))
    store_weight(weight, i, w - splat(step_size) * (m / denominator), lanes)
    store_moment(average, i, m, lanes)
    store_moment(square, i, v, lanes)


@kernel
def _adamw(weight, gradient, average, square, scalars):
    for block in prange(block_count(gradient.size)):
        over_block(_at, weight, gradient, (average, square), scalars, block)


@kernel
def _adamw_8bit(weight, gradient, average, square, scalars, work, keys, position):
    length = gradient.size
    for block in prange(block_count(length)):
        first, _, last = block_bounds(block, length)
        mean = (average[0], average[1], SIGNED, work, scratch_of(block, 0))
        power = (square[0], square[1], UNSIGNED, work, scratch_of(block, 1))
        for group in range(first, last, GROUP):
            over_group(_at, weight, gradient, (mean, power), scalars, group, last)
            encode(mean, group, length, keys[0], position)
            encode(power, group, length, keys[1], position)


def adamw(
    weight: Weight,
    gradient: np.ndarray,
    average: Moment,
    square: Moment,
    *,
    step: int,
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    gradient_scale: float = 1.0,
    key: int = 0,
    position: int = 0,
) -> None:
    """Update a weight and its moments in place.

    Args:
        weight: `(float32 [n],)` or the two uint16 halves `[n]` of a split master.
        gradient: float32 `[n]` or bfloat16 patterns (uint16 `[n]`).
        average: running mean of the gradient (`exp_avg`).
        square: running mean of its square (`exp_avg_sq`), of the same kind.
        step: number of this update, from 1; sets the bias corrections.
        learning_rate, beta1, beta2, epsilon: as in `torch.optim.AdamW`.
        weight_decay: decoupled: the weight is multiplied by `1 - learning_rate * weight_decay`.
        gradient_scale: the factor that is applied to the gradient first (the clip factor).
        key, position: seeds of the random rounding of 8-bit moments: a number of the weight, and
            the offset of these elements in the weight.

    Raises:
        ValueError: an array has another type, length or layout, or `step` is below 1.
    """
    if step < 1:
        raise ValueError(f"adamw: steps count from 1, got {step}")
    require_weight(weight, gradient.size)
    require_flat("gradient", gradient, gradient.size, np.float32, np.uint16)
    require_moment("exp_avg", average, gradient.size)
    require_moment("exp_avg_sq", square, gradient.size)
    scalars = (
        gradient_scale,
        1 - beta1,
        beta2,
        1 - beta2,
        1 / math.sqrt(1 - beta2**step),
        epsilon,
        1 - learning_rate * weight_decay,
        learning_rate / (1 - beta1**step),
    )
    rounded = tuple(map(np.float32, scalars))
    if isinstance(average, np.ndarray):
        _adamw(weight, gradient, average, square, rounded)
        return
    work = scratch(gradient.size)
    keys = rounding_keys(key, step)
    _adamw_8bit(weight, gradient, average, square, rounded, work, keys, position)
