"""Transposition of 16 vectors by shuffles.

A transposed square of 16 x 16 elements takes 64 shuffles. Elements of 16 bits are moved in pairs,
which are words of 32 bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types

from penstock.kernels.vector_code import load_vector, store_vector, vectors_at
from penstock.kernels.vectors import (
    LANES,
    element_pointer,
    fetch_lines,
    float32s,
    intrinsic,
    uint32s,
)

_I16, _I32, _I64 = (ir.IntType(bits) for bits in (16, 32, 64))
_FLOATS, _WORDS = float32s.ir, uint32s.ir
_SHORTS = ir.VectorType(_I16, LANES)
_SIXTEEN = ir.Constant(_WORDS, [16] * LANES)

# Each is one instruction of AVX-512. `a` are lanes 0 to 15 of a shuffle, `b` lanes 16 to 31.

_QUARTERS = range(0, LANES, 4)
_LOW_LANES, _HIGH_LANES = (
    [lane for q in _QUARTERS for lane in (q + h, q + h + 16, q + h + 1, q + h + 17)] for h in (0, 2)
)
_LOW_PAIRS, _HIGH_PAIRS = (
    [lane for q in _QUARTERS for lane in (q + h, q + h + 1, q + h + 16, q + h + 17)] for h in (0, 2)
)
_EVEN_QUARTERS, _ODD_QUARTERS = (
    [q + lane for q in range(h, 2 * LANES, 8) for lane in range(4)] for h in (0, 4)
)

_Shuffle = Callable[[Any, Any, Sequence[int]], Any]


def _transposed(rows: Sequence[Any], shuffle: _Shuffle) -> list[Any]:
    """Transpose 16 vectors of 16 lanes by 64 shuffles."""
    t = [
        shuffle(rows[i], rows[i + 1], lanes)
        for i in range(0, 16, 2)
        for lanes in (_LOW_LANES, _HIGH_LANES)
    ]
    r = [
        shuffle(t[i + half], t[i + half + 2], lanes)
        for i in range(0, 16, 4)
        for half in (0, 1)
        for lanes in (_LOW_PAIRS, _HIGH_PAIRS)
    ]
    for distance in (4, 8):
        joined = [None] * 16
        for i in range(16):
            if i & distance == 0:
                joined[i] = shuffle(r[i], r[i + distance], _EVEN_QUARTERS)
                joined[i + distance] = shuffle(r[i], r[i + distance], _ODD_QUARTERS)
        r = joined
    return r


def _shuffler(builder: Any) -> _Shuffle:
    kind = ir.VectorType(_I32, LANES)
    return lambda a, b, lanes: builder.shuffle_vector(a, b, ir.Constant(kind, list(lanes)))


def _transposing(
    read: Callable[..., list[Any]], write: Callable[..., None], source_kind: Any, target_kind: Any
) -> Any:
    @intrinsic
    def transpose(typing_context, source, source_at, source_stride, target, at, stride):
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def line(number: int, kind: Any, index: int) -> Any:
                array, at, stride = arguments[number : number + 3]
                place = builder.add(at, builder.mul(stride, ir.Constant(_I64, index)))
                return vectors_at(context, builder, kind, signature.args[number], array, place)

            rows = read(builder, lambda i: line(0, source_kind, i))
            columns = _transposed(rows, _shuffler(builder))
            write(builder, columns, lambda i: line(3, target_kind, i))
            return context.get_dummy_value()

        place = (types.intp, types.intp)
        return types.void(source, *place, target, *place), generate

    return transpose


def _read_words(builder: Any, line: Callable[[int], Any]) -> list[Any]:
    return [load_vector(builder, line(i), 0) for i in range(LANES)]


def _write_words(builder: Any, columns: list[Any], line: Callable[[int], Any]) -> None:
    for i, column in enumerate(columns):
        store_vector(builder, column, line(i), 0)


def _read_shorts(builder: Any, line: Callable[[int], Any]) -> list[Any]:
    """Words of the lines 2i (low halves) and 2i + 1 (high halves)."""
    words = []
    for i in range(0, 2 * LANES, 2):
        low, high = (builder.zext(load_vector(builder, line(i + h), 0), _WORDS) for h in (0, 1))
        words.append(builder.or_(low, builder.shl(high, _SIXTEEN)))
    return words


def _write_shorts(builder: Any, columns: list[Any], line: Callable[[int], Any]) -> None:
    for i, column in enumerate(columns):
        store_vector(builder, builder.trunc(column, _SHORTS), line(2 * i), 0)
        high = builder.lshr(column, _SIXTEEN)
        store_vector(builder, builder.trunc(high, _SHORTS), line(2 * i + 1), 0)


transpose_floats = _transposing(_read_words, _write_words, _FLOATS, _FLOATS)
"""In a kernel: transpose 16 x 16 float32 elements; source, its first element, its stride; target
likewise."""
transpose_to_features = _transposing(_read_words, _write_shorts, _WORDS, _SHORTS)
"""In a kernel: 16 lines of 32 uint16 elements become 32 lines of 16."""
transpose_to_tokens = _transposing(_read_shorts, _write_words, _SHORTS, _WORDS)
"""In a kernel: 32 lines of 16 uint16 elements become 16 lines of 32."""


@intrinsic
def fetch_square(typing_context, source, source_at, source_stride):
    """In a kernel: prefetch one line of 64 bytes of each of 16 rows, as `transpose_floats` and
    `transpose_to_features` read.

    Arguments: the array; the first element and the stride, in elements. Elements may lie beyond the
    array: a prefetch does not fault.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, at, stride = arguments
        for line in range(LANES):
            place = builder.add(at, builder.mul(stride, ir.Constant(_I64, line)))
            address = element_pointer(context, builder, signature.args[0], array, place)
            fetch_lines(builder, address, 1)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp), generate
