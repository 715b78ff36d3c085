"""AdamW in one pass: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019.

The arithmetic is that of `torch.optim.AdamW`, operation by operation in float32; scalars are
computed in float64 and rounded once. Entries of a sparse weight may differ in the number of their
updates (`sparsity/update_counts.py`): the bias corrections are then looked up by that number.
"""

import functools
import math
from typing import Any

import numpy as np
from numba import prange
from numba.extending import overload

from penstock.kernels.arguments import require_flat
from penstock.kernels.blocks import GRANULE, block_bounds, block_count, block_kernel
from penstock.kernels.compilation import inlined
from penstock.kernels.gradients import load_gradient
from penstock.kernels.moments import (
    GROUP,
    SIGNED,
    UNSIGNED,
    Moment,
    encode,
    encode_packed,
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
    granules_of,
    packed_blocks,
    packed_elements,
    packed_group_end,
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
    load,
    look_up,
    select,
    splat,
    square_root,
)

# In a kernel, the corrections of the moments' bias are (root scale, step size), or these two by
# age, the ages of the entries, and the greatest age.
_BY_AGE = 4


def _root_scale(corrections: Any, index: Any, lanes: Any) -> Any:
    raise TypeError("_root_scale works only inside a kernel")


def _step_size(corrections: Any, index: Any, lanes: Any) -> Any:
    raise TypeError("_step_size works only inside a kernel")


@overload(_root_scale, jit_options={"forceinline": True})
def _root_scale_of(corrections, index, lanes):
    if len(corrections) == _BY_AGE:
        return lambda corrections, index, lanes: look_up(
            corrections[0], _age(corrections, index, lanes)
        )
    return lambda corrections, index, lanes: splat(corrections[0])


@overload(_step_size, jit_options={"forceinline": True})
def _step_size_of(corrections, index, lanes):
    if len(corrections) == _BY_AGE:
        return lambda corrections, index, lanes: look_up(
            corrections[1], _age(corrections, index, lanes)
        )
    return lambda corrections, index, lanes: splat(corrections[1])


@inlined
def _age(corrections, index, lanes):
    age, most = load(corrections[2], index, lanes), splat(corrections[3])
    return select(age < most, age, most)


@inlined
def _at(weight, gradient, moments, scalars, i, lanes):
    average, square = moments
    numbers, corrections = scalars
    scale, average_rate, square_keep, square_rate, epsilon, keep = numbers
    w = load_weight(weight, i, lanes) * splat(keep)
    g = load_gradient(gradient, i, lanes) * splat(scale)
    m = load_moment(average, i, lanes)
    m = fma(splat(average_rate), g - m, m)
    v = fma(g * g, splat(square_rate), load_moment(square, i, lanes) * splat(square_keep))
    root_scale = _root_scale(corrections, i, lanes)
    denominator = fma(square_root(v), root_scale, splat(epsilon))
    store_weight(weight, i, w - _step_size(corrections, i, lanes) * (m / denominator), lanes)
    store_moment(average, i, m, lanes)
    store_moment(square, i, v, lanes)


# A parallel loop takes no tuples of tuples, so these are put together inside.


@block_kernel(over="gradient")
def _adamw(weight, gradient, average, square, numbers, corrections):
    for block in prange(block_count(gradient.size)):
        scalars = (numbers, corrections)
        over_block(_at, weight, gradient, (average, square), scalars, block)


@block_kernel(over="gradient")
def _adamw_8bit(weight, gradient, average, square, numbers, corrections, work, keys, position):
    length = gradient.size
    for block in prange(block_count(length)):
        scalars = (numbers, corrections)
        first, _, last = block_bounds(block, length)
        mean = (average[0], average[1], SIGNED, work, scratch_of(block, 0))
        power = (square[0], square[1], UNSIGNED, work, scratch_of(block, 1))
        for group in range(first, last, GROUP):
            over_group(_at, weight, gradient, (mean, power), scalars, group, last)
            encode(mean, group, length, keys[0], position)
            encode(power, group, length, keys[1], position)


@block_kernel(over="gradient")
def _adamw_8bit_packed(
    weight,
    gradient,
    average,
    square,
    numbers,
    corrections,
    work,
    keys,
    position,
    entries,
    groups,
):
    for block in prange(packed_blocks(entries)):
        scalars = (numbers, corrections)
        first, last = granules_of(block, entries)
        for granule in range(first, last):
            for begin in range(entries[granule], entries[granule + 1], GROUP):
                inside = begin - entries[granule]
                number = groups[granule] + inside // GROUP
                end = packed_group_end(entries, granule, begin)
                of_mean, of_power = scratch_of(block, 0), scratch_of(block, 1)
                mean = (average[0], average[1], SIGNED, work, of_mean, begin, number)
                power = (square[0], square[1], UNSIGNED, work, of_power, begin, number)
                over_group(_at, weight, gradient, (mean, power), scalars, begin, end)
                place = position + granule * GRANULE + inside
                encode_packed(mean, end - begin, keys[0], place)
                encode_packed(power, end - begin, keys[1], place)


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
    packed: PackedEntries | None = None,
    streamed: np.ndarray | None = None,
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
        packed: the entries of a sparse weight, to which the `n` elements belong.
        streamed: where the new streamed values are written (`streamed_to`), while the weight and
            its moments, which must be float32, stay as they are.

    Raises:
        ValueError: an array has another type, length or layout, or `step` is below 1.
    """
    if step < 1:
        raise ValueError(f"adamw: steps count from 1, got {step}")
    require_weight(weight, gradient.size)
    require_flat("gradient", gradient, gradient.size, np.float32, np.uint16)
    if packed is not None:
        packed.check(gradient.size)
    require_moment("exp_avg", average, gradient.size, packed)
    require_moment("exp_avg_sq", square, gradient.size, packed)
    keep = 1 - learning_rate * weight_decay
    scalars = (gradient_scale, 1 - beta1, beta2, 1 - beta2, epsilon, keep)
    if packed is None or packed.ages is None:
        corrections = _corrections(step, learning_rate, beta1, beta2)
    else:
        corrections = _corrections_by_age(packed, learning_rate, beta1, beta2)
    numbers = tuple(map(np.float32, scalars))
    if streamed is not None:
        target = streamed_to(weight, streamed, gradient.size)
        _adamw(target, gradient, only_read(average), only_read(square), numbers, corrections)
        return
    arrays = (weight, gradient, average, square)
    if isinstance(average, np.ndarray):
        _adamw(*arrays, numbers, corrections)
        return
    keys = rounding_keys(key, step)
    if packed is None:
        _adamw_8bit(*arrays, numbers, corrections, scratch(gradient.size), keys, position)
        return
    work, places = scratch(packed_elements(packed)), places_of(packed)
    _adamw_8bit_packed(*arrays, numbers, corrections, work, keys, position, *places)


def _corrections(
    step: int, learning_rate: float, beta1: float, beta2: float
) -> tuple[np.float32, np.float32]:
    root_scale = 1 / math.sqrt(1 - beta2**step)
    return np.float32(root_scale), np.float32(learning_rate / (1 - beta1**step))


def _corrections_by_age(
    packed: PackedEntries, learning_rate: float, beta1: float, beta2: float
) -> tuple[Any, ...]:
    """Return the same numbers for every age."""
    assert packed.ages is not None
    assert packed.updates is not None
    updates = packed.updates.tobytes()
    root_scales = 1 / np.sqrt(_bias(beta2, updates))
    step_sizes = learning_rate / _bias(beta1, updates)
    most = np.uint32(packed.updates.size - 1)
    return root_scales.astype(np.float32), step_sizes.astype(np.float32), packed.ages, most


@functools.lru_cache(maxsize=16)
def _bias(beta: float, updates: bytes) -> np.ndarray:
    """Return 1 - beta^n for every number of updates; Python's own power, as in `_corrections`."""
    return np.array([1 - beta**n for n in np.frombuffer(updates, np.int64).tolist()])
