"""A vector exponential for arguments that are not positive, as in a softmax.

Cody and Waite's reduction `x = n ln 2 + r`, `|r| <= ln 2 / 2`, with ln 2 in two parts so that `r`
loses nothing, and the degree-5 polynomial of the Cephes library (S. Moshier, `expf`) for `exp(r)`.
"""

import numpy as np

from penstock.kernels.compilation import inlined
from penstock.kernels.vectors import bits_of, fma, from_bits, select, shift_left, splat

# Adding 1.5 x 2^23 rounds to an integer, which is then in the low bits of the sum; with 127, the
# bias of the exponent field.
_ROUNDER = np.float32(12582912.0 + 127)
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_LEAST = np.float32(-87.3)  # below this, exp is less than the smallest normal float32
_P0 = np.float32(1.9875691500e-4)
_P1 = np.float32(1.3981999507e-3)
_P2 = np.float32(8.3334519073e-3)
_P3 = np.float32(4.1665795894e-2)
_P4 = np.float32(1.6666665459e-1)
_P5 = np.float32(5.0000001201e-1)


@inlined
def exponential(x):
    """`exp(x)` of a float32 vector with lanes up to 80; 0 below -87.3; NaN stays NaN."""
    shifted = fma(x, splat(_LOG2_E), splat(_ROUNDER))
    n = shifted - splat(_ROUNDER)
    r = fma(n, splat(-_LN2_HIGH), x)
    r = fma(n, splat(-_LN2_LOW), r)
    p = fma(splat(_P0), r, splat(_P1))
    p = fma(p, r, splat(_P2))
    p = fma(p, r, splat(_P3))
    p = fma(p, r, splat(_P4))
    p = fma(p, r, splat(_P5))
    p = fma(p, r * r, r) + splat(np.float32(1))
    # The factor is 2^n; in lanes that the selection drops, and of a NaN, it is garbage.
    scaled = p * from_bits(shift_left(bits_of(shifted), 23))
    return select(x < splat(_LEAST), splat(np.float32(0)), scaled)
