"""The common loop of all update rules: over the elements of a block, vector by vector.

A rule is an inlined function `at(weight, gradient, moments, scalars, i, lanes)` that updates the 16
elements from `i` on; `moments` is a tuple of the rule's moments. Numba compiles each call of a loop
here, with its rule, to the same code as a loop written for that rule.
"""

from __future__ import annotations

from typing import Any

from numba.extending import overload

from penstock.kernels.blocks import AHEAD, STRIDE, block_bounds
from penstock.kernels.compilation import inlined
from penstock.kernels.moments import GROUP, fetch_moment
from penstock.kernels.split_master import fetch_weight
from penstock.kernels.vectors import LANES, every_lane, fetch, first_lanes


@inlined
def over_block(at, weight, gradient, moments, scalars, block):
    """In a kernel: update a block of a weight whose moments are float32."""
    first, whole, last = block_bounds(block, gradient.size)
    for i in range(first, whole, STRIDE):
        fetch_weight(weight, i + AHEAD)
        fetch(gradient, i + AHEAD)
        _fetch_each(moments, i + AHEAD)
        for j in range(i, i + STRIDE, LANES):
            at(weight, gradient, moments, scalars, j, every_lane())
    for i in range(whole, last, LANES):
        at(weight, gradient, moments, scalars, i, first_lanes(last - i))


@inlined
def over_group(at, weight, gradient, moments, scalars, group, last):
    """In a kernel: update the group from `group` on, up to `last`, of 8-bit moments."""
    end = min(group + GROUP, last)
    whole = end - (end - group) % LANES
    for i in range(group, whole, LANES):
        at(weight, gradient, moments, scalars, i, every_lane())
    if whole < end:
        at(weight, gradient, moments, scalars, whole, first_lanes(end - whole))


def _fetch_each(moments: Any, index: Any) -> Any:
    raise TypeError("_fetch_each works only inside a kernel")


@overload(_fetch_each, jit_options={"forceinline": True})
def _fetch_moments(moments, index):
    if len(moments) == 0:
        return lambda moments, index: None
    if len(moments) == 1:
        return lambda moments, index: fetch_moment(moments[0], index)

    def both(moments, index):
        fetch_moment(moments[0], index)
        fetch_moment(moments[1], index)

    return both
