"""bfloat16 values as uint16 patterns, since NumPy has no bfloat16."""

import numpy as np

from penstock.kernels.compilation import inlined
from penstock.kernels.vectors import (
    bits_of,
    from_bits,
    is_nan,
    select,
    shift_left,
    shift_right,
    splat,
)


@inlined
def from_bfloat16(patterns):
    """The float32 values of 16 bfloat16 patterns, exactly."""
    return from_bits(shift_left(patterns, 16))


@inlined
def to_bfloat16(values):
    """The bfloat16 patterns nearest to 16 float32 values, ties to even, every NaN to 0x7FC0.

    The same patterns as `torch.Tensor.bfloat16` gives on a CPU, but that of a NaN, which depends on
    the processor there.
    """
    bits = bits_of(values)
    odd = shift_right(bits, 16) & splat(np.uint32(1))
    rounded = shift_right(bits + splat(np.uint32(0x7FFF)) + odd, 16)
    return select(is_nan(values), splat(np.uint32(0x7FC0)), rounded)
