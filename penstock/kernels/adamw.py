"""AdamW in one pass: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019.

The arithmetic is that of `torch.optim.AdamW`, operation by operation in float32; scalars are
computed in float64 and rounded once.
"""

import math

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
    splat,
    square_root,
    store,
)


@inlined
def _at(weight, gradient, average, square, scalars, i, lanes):
    scale, average_rate, square_keep, square_rate, root_scale, epsilon, keep, step_size = scalars
    w = load_weight(weight, i, lanes) * splat(keep)
    g = load_gradient(gradient, i, lanes) * splat(scale)
    m = load(average, i, lanes)
    m = fma(splat(average_rate), g - m, m)
    v = fma(g * g, splat(square_rate), load(square, i, lanes) * splat(square_keep))
    denominator = fma(square_root(v), splat(root_scale), splat(epsilon))
    store_weight(weight, i, w - splat(step_size) * (m / denominator), lanes)
    store(average, i, m, lanes)
    store(square, i, v, lanes)


@kernel
def _adamw(weight, gradient, average, square, scalars):
    length = gradient.size
    for block in prange(block_count(length)):
        first, whole, last = block_bounds(block, length)
        for i in range(first, whole, STRIDE):
            fetch_weight(weight, i + AHEAD)
            fetch(gradient, i + AHEAD)
            fetch(average, i + AHEAD)
            fetch(square, i + AHEAD)
            for j in range(i, i + STRIDE, LANES):
                _at(weight, gradient, average, square, scalars, j, every_lane())
        for i in range(whole, last, LANES):
            _at(weight, gradient, average, square, scalars, i, first_lanes(last - i))


def adamw(
    weight: Weight,
    gradient: np.ndarray,
    average: np.ndarray,
    square: np.ndarray,
    *,
    step: int,
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    gradient_scale: float = 1.0,
) -> None:
    """Update a weight and its moments in place.

    Args:
        weight: `(float32 [n],)` or the two uint16 halves `[n]` of a split master.
        gradient: float32 `[n]` or bfloat16 patterns (uint16 `[n]`).
        average: float32 `[n]`, running mean of the gradient (`exp_avg`).
        square: float32 `[n]`, running mean of its square (`exp_avg_sq`).
        step: number of this update, from 1; sets the bias corrections.
        learning_rate, beta1, beta2, epsilon: as in `torch.optim.AdamW`.
        weight_decay: decoupled: the weight is multiplied by `1 - learning_rate * weight_decay`.
        gradient_scale: what the gradient is multiplied by first (the clip factor).

    Raises:
        ValueError: an array has another type, length or layout, or `step` is below 1.
    """
    if step < 1:
        raise ValueError(f"adamw: steps count from 1, got {step}")
    require_weight(weight, gradient.size)
    require_flat("gradient", gradient, gradient.size, np.float32, np.uint16)
    require_flat("exp_avg", average, gradient.size, np.float32, write=True)
    require_flat("exp_avg_sq", square, gradient.size, np.float32, write=True)
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
    _adamw(weight, gradient, average, square, tuple(map(np.float32, scalars)))
