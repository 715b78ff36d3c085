"""Stochastic gradient descent, with momentum or without, in one pass.

The arithmetic is that of `torch.optim.SGD` with dampening 0: weight decay is added to the gradient
(L2 regularisation), *not* decoupled as in AdamW and Lion. A momentum of zeros at the first step is
the same as torch's copy of the first gradient.
"""

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
from penstock.kernels.vectors import fma, splat


@inlined
def _plain_at(weight, gradient, moments, scalars, i, lanes):
    scale, decay, learning_rate = scalars
    w = load_weight(weight, i, lanes)
    g = fma(splat(decay), w, load_gradient(gradient, i, lanes) * splat(scale))
    store_weight(weight, i, w - splat(learning_rate) * g, lanes)


@block_kernel(over="gradient")
def _plain(weight, gradient, scalars):
    for block in prange(block_count(gradient.size)):
        over_block(_plain_at, weight, gradient, (), scalars, block)


@inlined
def _momentum_at(weight, gradient, moments, scalars, i, lanes):
    momentum = moments[0]
    scale, decay, learning_rate, keep, of_gradient, of_momentum = scalars
    w = load_weight(weight, i, lanes)
    g = fma(splat(decay), w, load_gradient(gradient, i, lanes) * splat(scale))
    m = fma(splat(keep), load_moment(momentum, i, lanes), g)
    direction = fma(splat(of_momentum), m, splat(of_gradient) * g)
    store_weight(weight, i, w - splat(learning_rate) * direction, lanes)
    store_moment(momentum, i, m, lanes)


@block_kernel(over="gradient")
def _momentum(weight, gradient, momentum, scalars):
    for block in prange(block_count(gradient.size)):
        over_block(_momentum_at, weight, gradient, (momentum,), scalars, block)


@block_kernel(over="gradient")
def _momentum_8bit(weight, gradient, momentum, scalars, work, key, position):
    length = gradient.size
    for block in prange(block_count(length)):
        first, _, last = block_bounds(block, length)
        mean = (momentum[0], momentum[1], SIGNED, work, scratch_of(block, 0))
        for group in range(first, last, GROUP):
            over_group(_momentum_at, weight, gradient, (mean,), scalars, group, last)
            encode(mean, group, length, key, position)


@block_kernel(over="gradient")
def _momentum_8bit_packed(
    weight, gradient, momentum, scalars, work, key, position, entries, groups
):
    places = (entries, groups)
    for block in prange(packed_blocks(entries)):
        over_packed_block(
            _momentum_at, weight, gradient, momentum, scalars, work, key, position, places, block
        )


def sgd(
    weight: Weight,
    gradient: np.ndarray,
    *,
    learning_rate: float,
    weight_decay: float,
    gradient_scale: float = 1.0,
) -> None:
    """Update a weight in place, without momentum.

    Args:
        weight: `(float32 [n],)` or the two uint16 halves `[n]` of a split master.
        gradient: float32 `[n]` or bfloat16 patterns (uint16 `[n]`).
        learning_rate: factor on the gradient.
        weight_decay: factor on the weight; the product is added to the gradient.
        gradient_scale: the factor that is applied to the gradient first (the clip factor).

    Raises:
        ValueError: an array has another type, length or layout.
    """
    require_weight(weight, gradient.size)
    require_flat("gradient", gradient, gradient.size, np.float32, np.uint16)
    scalars = (gradient_scale, weight_decay, learning_rate)
    _plain(weight, gradient, tuple(map(np.float32, scalars)))


def sgd_momentum(
    weight: Weight,
    gradient: np.ndarray,
    momentum_state: Moment,
    *,
    step: int,
    learning_rate: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    gradient_scale: float = 1.0,
    key: int = 0,
    position: int = 0,
    packed: PackedEntries | None = None,
    streamed: np.ndarray | None = None,
) -> None:
    """Update a weight and its momentum in place; the rest is as for `sgd`.

    The weight moves along the momentum or, with `nesterov`, along gradient + `momentum` x momentum.
    The seeds of the random rounding of an 8-bit momentum are `key`, a number of the weight, `step`,
    the number of this update, and `position`, the offset of these elements in the weight. `packed`
    are the entries of a sparse weight, to which the elements belong. With `streamed`, the new
    streamed values are written there (`streamed_to`), and the weight and its momentum, which must
    be float32, stay as they are.
    """
    require_weight(weight, gradient.size)
    require_flat("gradient", gradient, gradient.size, np.float32, np.uint16)
    if packed is not None:
        packed.check(gradient.size)
    require_moment("momentum", momentum_state, gradient.size, packed)
    # Both forms are one linear combination: one kernel computes both, exactly.
    of_gradient, of_momentum = (1.0, momentum) if nesterov else (0.0, 1.0)
    scalars = (gradient_scale, weight_decay, learning_rate, momentum, of_gradient, of_momentum)
    rounded = tuple(map(np.float32, scalars))
    if streamed is not None:
        target = streamed_to(weight, streamed, gradient.size)
        _momentum(target, gradient, only_read(momentum_state), rounded)
        return
    if isinstance(momentum_state, np.ndarray):
        _momentum(weight, gradient, momentum_state, rounded)
        return
    keys = rounding_keys(key, step)
    if packed is None:
        work = scratch(gradient.size)
        _momentum_8bit(weight, gradient, momentum_state, rounded, work, keys[0], position)
        return
    work, places = scratch(packed_elements(packed)), places_of(packed)
    _momentum_8bit_packed(
        weight, gradient, momentum_state, rounded, work, keys[0], position, *places
    )
