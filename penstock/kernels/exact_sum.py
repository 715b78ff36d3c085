"""Sums without rounding: the sum of float64 numbers is represented exactly by a few float64
numbers.

Exact partial sums can be added in any order and in any grouping. Only the last addition rounds,
once, so the result has the same bits. The method is that of `math.fsum` (Shewchuk, "Adaptive
Precision Floating-Point Arithmetic and Fast Robust Geometric Predicates", 1997).
"""

import numpy as np

from penstock.kernels.arguments import require_flat
from penstock.kernels.compilation import serial_kernel

_MOST_PARTS = 64  # parts do not overlap, and float64 has 2,098 places for bits of 53


@serial_kernel
def _add_up(values, parts):
    count = 0
    for value in values:
        high = value
        kept = 0
        for i in range(count):
            great, small = high, parts[i]
            if abs(great) < abs(small):
                great, small = small, great
            high = great + small
            low = small - (high - great)
            if low != 0.0:
                parts[kept] = low
                kept += 1
        parts[kept] = high
        count = kept + 1
    return count


def exact_sum(values: np.ndarray) -> tuple[float, ...]:
    """Return numbers whose exact sum is that of float64 `values` `[n]`, the smallest first.

    There are none for an empty array. If a value is not finite, the result is one number that
    is not finite.
    """
    require_flat("values", values, values.size, np.float64)
    if not np.isfinite(values).all():
        return (float("nan"),)
    parts = np.empty(_MOST_PARTS, np.float64)
    return tuple(parts[: _add_up(values, parts)].tolist())
