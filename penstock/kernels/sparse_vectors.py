"""Explicit vectors of sparse products: one row of a sparse matrix against a panel of tokens.

A panel holds some tokens of all features, feature after feature: `[feature][token]`. The sums of a
row of outputs stay in registers while the row's entries pass by: one load of 16 tokens of a feature
and one multiply-add per 16 tokens. A vector of bfloat16 has 32 tokens, in two vectors of float32
sums: the even and the odd ones or, for dot products of pairs, the first and the last four of every
eight.

The processor's dot product multiplies the features of two entries of a row at once. It adds the
higher product of a pair first, each rounded once. So the earlier entry is the higher one, and
pairing changes no sum.

The tokens of a panel are a constant of the compiled code, so that the sums are registers. They are
the length of the tuple `width`, one element per 16 tokens: a part of the signature, by which Numba
finds compiled code. (A constant of a module is not: code compiled for another one would be used.)
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from penstock.kernels.pair_code import dot_of_pairs, even_and_odd, joined, rounded, shuffled
from penstock.kernels.vector_code import (
    Sums,
    for_entries,
    load_vector,
    multiply_add,
    started_sums,
    store_vector,
    vectors_at,
)
from penstock.kernels.vectors import (
    LANES,
    element_pointer,
    float32s,
    intrinsic,
    splat_scalar,
    uint32s,
)

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = float32s.ir, uint32s.ir
_SIXTEEN = ir.Constant(_WORDS, [16] * LANES)
_NO_WORDS = ir.Constant(_WORDS, [0] * LANES)
_NEGATIVE_ZEROS = ir.Constant(_WORDS, [0x8000] * LANES)  # in the lower halves
# Of two vectors of shorts: those of the first in the lower halves of words, of the second in the
# higher, for the first and for the last four of every eight.
_PAIRS = [
    [vector + eight + n for eight in range(0, 32, 8) for n in four for vector in (0, 32)]
    for four in (range(4), range(4, 8))
]
# Of two vectors of words, which have those fours: the higher halves, in the order of tokens.
_HIGHER_HALVES = [
    vector + 2 * (four + n) + 1 for four in range(0, 16, 4) for vector in (0, 32) for n in range(4)
]

_Scale = Callable[[Any, Any, list[Any], Sums], Sums]
_Join = Callable[[Any, Any, Any], Any]


# --- building blocks of code generation ----------------------------------------------------------


def column_offsets(builder: Any, columns: Any, count: int, vectors: int) -> list[Any]:
    """Generate the vector offsets of the features of `count` (4, 2 or 1) consecutive entries.

    Args:
        columns: the address of the first entry's column, uint16.
        vectors: of a feature in a panel.
    """
    word = ir.IntType(16 * count)
    # Of little-endian memory: the first is the lowest.
    together = builder.load(builder.bitcast(columns, word.as_pointer()), align=2)
    together = builder.zext(together, _I64) if count < 4 else together
    mask = ir.Constant(_I64, 0xFFFF)
    numbers = [
        builder.and_(builder.lshr(together, ir.Constant(_I64, 16 * n)), mask) for n in range(count)
    ]
    return [builder.mul(number, ir.Constant(_I64, vectors)) for number in numbers]


# --- the sum of scaled features (Y = W X) --------------------------------------------------------


def _scale_floats(builder: Any, values: Any, features: list[Any], sums: Sums) -> Sums:
    for n, feature in enumerate(features):
        factor = _splat_value(builder, values, n)
        sums = [
            multiply_add(builder, factor, load_vector(builder, feature, v, 4), total)
            for v, total in enumerate(sums)
        ]
    return sums


def _scale_unpacked(builder: Any, values: Any, features: list[Any], sums: Sums) -> Sums:
    for n, feature in enumerate(features):
        factor = _splat_value(builder, values, n)
        added = []
        for v in range(len(sums) // 2):
            halves = even_and_odd(builder, load_vector(builder, feature, v))
            added += [
                multiply_add(builder, factor, half, total)
                for half, total in zip(halves, sums[2 * v : 2 * v + 2], strict=True)
            ]
        sums = added
    return sums


def _scale_by_dots(builder: Any, values: Any, features: list[Any], sums: Sums) -> Sums:
    # Values are patterns, of which the earlier is the lower half of a word in memory.
    if len(features) == 2:
        together = builder.load(builder.bitcast(values, _I32.as_pointer()), align=2)
    else:
        together = builder.zext(builder.load(values, align=2), _I32)
    words = splat_scalar(builder, together)
    # A single entry is followed by -0 times 0, since any sum plus -0 is that sum, also -0.
    second = builder.lshr(words, _SIXTEEN) if len(features) == 2 else _NEGATIVE_ZEROS
    factors = builder.or_(builder.shl(words, _SIXTEEN), second)
    added = []
    for v in range(len(sums) // 2):
        first, *other = (load_vector(builder, feature, v) for feature in features)
        for places, total in zip(_PAIRS, sums[2 * v : 2 * v + 2], strict=True):
            pairs = shuffled(builder, other[0] if other else _NO_WORDS, first, places)
            added.append(dot_of_pairs(builder, total, pairs, factors))
    return added


def _splat_value(builder: Any, values: Any, number: int) -> Any:
    place = builder.gep(values, [ir.Constant(_I64, number)])
    return splat_scalar(builder, builder.load(place, align=4))


def _join_fours(builder: Any, first: Any, last: Any) -> Any:
    return shuffled(builder, first, last, _HIGHER_HALVES)


def _start_sums(builder: Any, is_first: Any, start: Any, sums: Any, count: int) -> Sums:
    """A scalar in all lanes where `is_first`, else what lies in memory."""
    return started_sums(
        builder,
        is_first,
        lambda: splat_scalar(builder, start),
        lambda: [load_vector(builder, sums, v, 4) for v in range(count)],
    )


def _finish_sums(
    builder: Any, is_last: Any, totals: Sums, sums: Any, outputs: Any, join: _Join | None
) -> None:
    if join is None:
        for v, total in enumerate(totals):
            store_vector(builder, total, sums, v, 4)
        return
    with builder.if_else(is_last) as (then, otherwise):
        with then:
            for v in range(len(totals) // 2):
                halves = (rounded(builder, total) for total in totals[2 * v : 2 * v + 2])
                store_vector(builder, join(builder, *halves), outputs, v)
        with otherwise:
            for v, total in enumerate(totals):
                store_vector(builder, total, sums, v, 4)


def _scaling(scale: _Scale, together: int, values_type: Any, join: _Join | None = None) -> Any:
    """Generate the sum of scaled features.

    Args:
        scale: adds `together` entries, or one, to sums, from the address of their values and those
            of their features.
        join: 32 patterns, in the order of tokens, of two vectors of rounded sums; None for float32.
    """

    @intrinsic
    def add_scaled(
        typing_context,
        outputs,
        output_at,
        sums,
        sums_at,
        start,
        is_first,
        is_last,
        inputs,
        inputs_at,
        columns,
        values,
        begin,
        end,
        width,
    ):
        is_bfloat16 = inputs.dtype == types.uint16
        if outputs.dtype != inputs.dtype or (is_bfloat16 and width.count % 2):
            return None
        if is_bfloat16 != (join is not None) or values.dtype != values_type:
            return None
        kind = _WORDS if is_bfloat16 else _FLOATS
        vectors = width.count // 2 if is_bfloat16 else width.count

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def at(number: int, of: Any) -> Any:
                array, index = arguments[number : number + 2]
                return vectors_at(context, builder, of, signature.args[number], array, index)

            def address(number: int, entry: Any) -> Any:
                kind, array = signature.args[number], arguments[number]
                return element_pointer(context, builder, kind, array, entry)

            panel = at(7, kind)

            def body(count: int) -> Callable[[Any, Sums], Sums]:
                def step(entry: Any, totals: Sums) -> Sums:
                    offsets = column_offsets(builder, address(9, entry), count, vectors)
                    features = [builder.gep(panel, [offset]) for offset in offsets]
                    return scale(builder, address(10, entry), features, totals)

                return step

            start, is_first, is_last = arguments[4:7]
            begin, end = arguments[11:13]
            totals = _start_sums(builder, is_first, start, at(2, _FLOATS), width.count)
            groups = builder.and_(builder.sub(end, begin), ir.Constant(_I64, -together))
            whole = builder.add(begin, groups)
            totals = for_entries(builder, begin, whole, totals, body(together), together)
            totals = for_entries(builder, whole, end, totals, body(1))
            _finish_sums(builder, is_last, totals, at(2, _FLOATS), at(0, kind), join)
            return context.get_dummy_value()

        places = (outputs, types.intp, sums, types.intp, types.float32, types.boolean)
        source = (types.boolean, inputs, types.intp, columns, values, types.intp, types.intp, width)
        return types.void(*places, *source), generate

    return add_scaled


add_scaled_floats = _scaling(_scale_floats, 4, types.float32)
"""In a kernel: add to the sums of a row of outputs its entries times the features of their columns.

Arguments: outputs and where the row begins there; float32 sums and where (the outputs themselves,
if these are float32); the start of the sums; whether they start here; whether they end here and go
to the outputs, rounded; inputs and where the columns begin there; local columns, uint16; float32
values; the first entry and the end; `width`.
"""
add_scaled_unpacked = _scaling(_scale_unpacked, 4, types.float32, joined)
"""The same for panels of bfloat16 patterns, on any processor."""
add_scaled_by_dots = _scaling(_scale_by_dots, 2, types.uint16, _join_fours)
"""The same with the processor's dot product of bfloat16 pairs; values are bfloat16 patterns too.

It takes denormals for 0.
"""


# --- single elements -----------------------------------------------------------------------------


@intrinsic
def float_of(typing_context, value):
    """The float32 value of a stored number: itself, or that of a bfloat16 pattern (uint16)."""
    if value == types.float32:
        return types.float32(value), lambda context, builder, signature, arguments: arguments[0]
    if value != types.uint16:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.shl(builder.zext(arguments[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(value), generate
