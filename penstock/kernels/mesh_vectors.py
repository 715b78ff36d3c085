"""What the vector operations of a simulated core compute: 32-bit numbers, or 16-bit ones.

An operation computes in 32 bits; where it `ROUNDS`, each result is rounded to a 16-bit number (to
nearest, ties to even). A dot product is summed in 32 bits in the order of its elements.
"""

import math

import numpy as np

from penstock.kernels.compilation import called, inlined
from penstock.kernels.mesh_tables import (
    ADD_CELLS,
    AMOUNT,
    AXPY,
    BAD_ADDRESS,
    BASE,
    CELL,
    CELLS,
    CORE_AT,
    CORE_NUMBER,
    DIVIDE_CELLS,
    DOT,
    FACTOR,
    FACTORS,
    FAULT,
    FAULT_CORE,
    FAULT_ROW,
    FAULT_VALUE,
    FILL,
    HIGH,
    LENGTH,
    LINEAR,
    LOW,
    MULTIPLY,
    MULTIPLY_CELLS,
    OP,
    REGISTER,
    REGISTERS,
    ROUNDS,
    STRIDE,
    SUBTRACT_CELLS,
    B,
    C,
    D,
    S,
)

_HALF_LEAST = np.float32(2.0**-14)  # of normal 16-bit numbers
_HALF_PLACE = np.float32(0.75)  # a 32-bit number whose last place is that of the least 16-bit one
_HALF_MOST = np.float32(65504.0)
_MOST_SHOWN = (1 << 31) - 1
_INFINITE = np.float32(np.inf)


@inlined
def half(value):
    """Return a 32-bit number rounded to the nearest 16-bit one."""
    value = np.float32(value)
    size = abs(value)
    if size < _HALF_LEAST:
        return np.float32(value + _HALF_PLACE) - _HALF_PLACE
    if not (size < _INFINITE):
        return value
    bits = value.view(np.int32)
    # 13 of the mantissa's bits go; ties to even.
    bits = np.int32((bits + np.int32(0x0FFF) + ((bits >> np.int32(13)) & np.int32(1))) & ~0x1FFF)
    found = bits.view(np.float32)
    if abs(found) > _HALF_MOST:
        return _INFINITE if found > 0 else -_INFINITE
    return found


@called
def address(t, block, row, operand, length):
    """Return where an operand begins among all floats; -1 if there is none, -2 and a fault if it is
    outside its array."""
    place = row + operand
    start = t[place + BASE]
    if start < 0:
        return -1
    register = t[place + REGISTER]
    if register >= 0:
        start += t[block + t[CORE_AT] + REGISTERS + register] * t[place + STRIDE]
    if start < t[place + LOW] or start + length > t[place + HIGH]:
        t[FAULT] = BAD_ADDRESS
        t[FAULT_CORE] = t[block + CORE_NUMBER]
        t[FAULT_ROW] = row
        t[FAULT_VALUE] = max(-_MOST_SHOWN, min(start - t[place + LOW], _MOST_SHOWN))
        return -2
    return t[block + t[CORE_AT] + CELLS] + start


@called
def compute(t, f, block, row):
    """Do a vector operation, or one on single cells; there is a fault if it was out of range."""
    op, length = t[row + OP], t[row + LENGTH]
    d = address(t, block, row, D, 1 if op in (DOT, CELL) else length)
    b = address(t, block, row, B, length)
    c = address(t, block, row, C, length)
    s = address(t, block, row, S, 1)
    if t[FAULT]:
        return
    rounds = t[row + ROUNDS] != 0
    scale = f[t[FACTORS] + t[row + FACTOR]]
    if s >= 0:
        scale = scale * f[s]
    if op == AXPY:
        if rounds:
            for i in range(length):
                f[d + i] = half(f[d + i] + scale * f[b + i])
        else:
            for i in range(length):
                f[d + i] += scale * f[b + i]
    elif op == LINEAR:  # d = c + scale b
        for i in range(length):
            found = scale * f[b + i]
            if c >= 0:
                found += f[c + i]
            f[d + i] = half(found) if rounds else found
    elif op == MULTIPLY:
        for i in range(length):
            found = f[b + i] * f[c + i]
            f[d + i] = half(found) if rounds else found
    elif op == FILL:
        for i in range(length):
            f[d + i] = half(scale) if rounds else scale
    elif op == DOT:
        total = np.float32(0.0)
        for i in range(length):
            total += f[b + i] * f[c + i]
        f[d] = total
    else:
        kind = t[row + AMOUNT]
        if kind == ADD_CELLS:
            f[d] = f[b] + f[c]
        elif kind == SUBTRACT_CELLS:
            f[d] = f[b] - f[c]
        elif kind == MULTIPLY_CELLS:
            f[d] = f[b] * f[c]
        elif kind == DIVIDE_CELLS:
            f[d] = f[b] / f[c]
        else:
            f[d] = math.sqrt(f[b])
