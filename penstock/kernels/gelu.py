"""GELU in its tanh form and its gradient (Hendrycks & Gimpel, 2016), one exponential per element.

    gelu(x) = x / 2 (1 + tanh(u)) = x s(2 u),  u = sqrt(2 / pi) (x + 0.044715 x^3)

where s is the logistic function. With e = exp(-|2 u|), s is 1 / (1 + e) or e / (1 + e), and its
derivative e / (1 + e)^2, without cancellation. Elements are computed in float32 and rounded
once. An element's result does not depend on its position or on the number of threads.
"""

import math

import numpy as np
from numba import prange

from penstock.kernels.arguments import require_flat
from penstock.kernels.blocks import STRIDE, block_bounds, block_count, block_kernel
from penstock.kernels.compilation import inlined
from penstock.kernels.exponential import exponential
from penstock.kernels.gradients import load_gradient, store_gradient
from penstock.kernels.vectors import (
    LANES,
    bits_of,
    every_lane,
    first_lanes,
    fma,
    from_bits,
    select,
    splat,
)

_SLOPE = np.float32(2 * math.sqrt(2 / math.pi))
_CUBE = np.float32(2 * math.sqrt(2 / math.pi) * 0.044715)
_THREE_CUBES = np.float32(3 * 2 * math.sqrt(2 / math.pi) * 0.044715)
_ONE, _ZERO = np.float32(1), np.float32(0)
_NO_SIGN = np.uint32(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)


@inlined
def _logistic(x):
    """Return s(2 u), and s's derivative there, of a float32 vector."""
    argument = x * fma(x * x, splat(_CUBE), splat(_SLOPE))
    magnitude = bits_of(argument) & splat(_NO_SIGN)
    small = exponential(from_bits(magnitude | splat(_SIGN)))
    share = splat(_ONE) / (small + splat(_ONE))
    other = small * share
    return select(argument < splat(_ZERO), other, share), other * share


@inlined
def _value_at(x, out, i, lanes):
    value = load_gradient(x, i, lanes)
    share, _ = _logistic(value)
    store_gradient(out, i, value * share, lanes)


@inlined
def _gradient_at(gradient, x, out, i, lanes):
    value = load_gradient(x, i, lanes)
    share, slope = _logistic(value)
    inner = fma(value * value, splat(_THREE_CUBES), splat(_SLOPE))
    derivative = fma(value * slope, inner, share)  # the slope is 0 before the product overflows
    store_gradient(out, i, load_gradient(gradient, i, lanes) * derivative, lanes)


@block_kernel(over="x")
def _values(x, out):
    for block in prange(block_count(x.size)):
        first, whole, last = block_bounds(block, x.size)
        for i in range(first, whole, STRIDE):
            for j in range(i, i + STRIDE, LANES):
                _value_at(x, out, j, every_lane())
        for i in range(whole, last, LANES):
            _value_at(x, out, i, first_lanes(last - i))


@block_kernel(over="x")
def _gradients(gradient, x, out):
    for block in prange(block_count(x.size)):
        first, whole, last = block_bounds(block, x.size)
        for i in range(first, whole, STRIDE):
            for j in range(i, i + STRIDE, LANES):
                _gradient_at(gradient, x, out, j, every_lane())
        for i in range(whole, last, LANES):
            _gradient_at(gradient, x, out, i, first_lanes(last - i))


def gelu(x: np.ndarray, out: np.ndarray) -> None:
    """Write gelu of each element, tanh form.

    Args:
        x: float32, or uint16 for bfloat16 patterns, flat.
        out: of the same type and length.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    require_flat("x", x, x.size, np.float32, np.uint16)
    require_flat("out", out, x.size, x.dtype.type, write=True)
    _values(x, out)


def gelu_backward(gradient: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    """Write the gradient of each input of gelu, from that of its output.

    Args:
        gradient: float32, or uint16 for bfloat16 patterns, flat.
        x, out: of the same type and length.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    require_flat("x", x, x.size, np.float32, np.uint16)
    require_flat("gradient", gradient, x.size, x.dtype.type)
    require_flat("out", out, x.size, x.dtype.type, write=True)
    _gradients(gradient, x, out)
