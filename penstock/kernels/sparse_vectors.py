"""Explicit vectors of sparse products: one row of a sparse matrix against a panel of tokens.

A panel holds some tokens of all features, feature after feature: `[feature][token]`. The sums of a
row of outputs stay in registers while the row's entries pass by: one load of 16 tokens of a feature
and one multiply-add per 16 tokens. A vector of bfloat16 has 32 tokens, of which the even and the
odd ones are summed apart, in float32.

The tokens of a panel are a constant of the compiled code, so that the sums are registers. They are
the length of the tuple `width`, one element per 16 tokens: a part of the signature, by which Numba
finds compiled code. (A constant of a module is not: code compiled for another one would be used.)
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from penstock.kernels.vector_code import (
    Sums,
    for_entries,
    load_vector,
    multiply_add,
    processor_features,
    started_sums,
    store_vector,
    vectors_at,
)
from penstock.kernels.vectors import (
    LANES,
    call_llvm,
    element_pointer,
    float32s,
    intrinsic,
    splat_scalar,
    uint32s,
)

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = float32s.ir, uint32s.ir
_HIGH_HALF = ir.Constant(_WORDS, [-65536] * LANES)
_SIXTEEN = ir.Constant(_WORDS, [16] * LANES)

Step = Callable[[Any, Any, Any, Sums], Sums]


def has_bfloat16_dot() -> bool:
    """Whether the processor has the dot product of bfloat16 pairs."""
    return "+avx512bf16" in processor_features()


# --- building blocks of code generation ----------------------------------------------------------


def even_and_odd(builder: Any, words: Any) -> tuple[Any, Any]:
    """Generate the float32 values of the even and of the odd ones of 32 bfloat16 patterns."""
    even = builder.bitcast(builder.shl(words, _SIXTEEN), _FLOATS)
    return even, builder.bitcast(builder.and_(words, _HIGH_HALF), _FLOATS)


def dot_of_pairs(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Generate `total` plus, lane by lane, the products of two pairs of bfloat16 patterns."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return call_llvm(builder, name, _FLOATS, [total, a, b])


def column_offsets(builder: Any, columns: Any, count: int, vectors: int) -> list[Any]:
    """Generate the vector offsets of the features of `count` (4 or 1) consecutive entries.

    Args:
        columns: the address of the first entry's column, uint16.
        vectors: of a feature in a panel.
    """
    if count == 1:
        numbers = [builder.zext(builder.load(columns, align=2), _I64)]
    else:
        words = builder.bitcast(columns, _I64.as_pointer())
        four = builder.load(words, align=2)  # of little-endian memory: the first is the lowest
        mask = ir.Constant(_I64, 0xFFFF)
        numbers = [
            builder.and_(builder.lshr(four, ir.Constant(_I64, 16 * n)), mask) for n in range(count)
        ]
    return [builder.mul(number, ir.Constant(_I64, vectors)) for number in numbers]


def _rounded(builder: Any, values: Any) -> Any:
    """The bfloat16 patterns nearest to float32 values, in the high halves of words.

    Ties go to even, every NaN to 0x7FC0, as in `penstock.kernels.bfloat16`.
    """
    bits = builder.bitcast(values, _WORDS)
    odd = builder.and_(builder.lshr(bits, _SIXTEEN), ir.Constant(_WORDS, [1] * LANES))
    up = builder.add(builder.add(bits, ir.Constant(_WORDS, [0x7FFF] * LANES)), odd)
    no_number = builder.fcmp_unordered("uno", values, values)
    nan = ir.Constant(_WORDS, [0x7FC00000] * LANES)
    return builder.and_(builder.select(no_number, nan, up), _HIGH_HALF)


# --- the sum of scaled features (Y = W X) --------------------------------------------------------


def _scale_floats(builder: Any, weight: Any, feature: Any, sums: Sums) -> Sums:
    factor = splat_scalar(builder, weight)
    return [
        multiply_add(builder, factor, load_vector(builder, feature, v, 4), total)
        for v, total in enumerate(sums)
    ]


def _scale_unpacked(builder: Any, weight: Any, feature: Any, sums: Sums) -> Sums:
    factor = splat_scalar(builder, weight)
    added = []
    for v in range(len(sums) // 2):
        halves = even_and_odd(builder, load_vector(builder, feature, v))
        added += [
            multiply_add(builder, factor, half, total)
            for half, total in zip(halves, sums[2 * v : 2 * v + 2], strict=True)
        ]
    return added


def _scale_by_dots(builder: Any, weight: Any, feature: Any, sums: Sums) -> Sums:
    # The weight is a bfloat16 value: its pattern is the high half. As the pair (0, w) it multiplies
    # the odd tokens, as (w, 0) the even ones, without unpacking them.
    odd = builder.bitcast(splat_scalar(builder, weight), _WORDS)
    even = builder.lshr(odd, _SIXTEEN)
    added = []
    for v in range(len(sums) // 2):
        pairs = load_vector(builder, feature, v)
        added.append(dot_of_pairs(builder, sums[2 * v], pairs, even))
        added.append(dot_of_pairs(builder, sums[2 * v + 1], pairs, odd))
    return added


def _start_sums(builder: Any, is_first: Any, start: Any, sums: Any, count: int) -> Sums:
    """A scalar in all lanes where `is_first`, else what lies in memory."""
    return started_sums(
        builder,
        is_first,
        lambda: splat_scalar(builder, start),
        lambda: [load_vector(builder, sums, v, 4) for v in range(count)],
    )


def _finish_sums(
    builder: Any, is_last: Any, totals: Sums, sums: Any, outputs: Any, is_bfloat16: bool
) -> None:
    if not is_bfloat16:
        for v, total in enumerate(totals):
            store_vector(builder, total, sums, v, 4)
        return
    with builder.if_else(is_last) as (then, otherwise):
        with then:
            for v in range(len(totals) // 2):
                even, odd = (_rounded(builder, total) for total in totals[2 * v : 2 * v + 2])
                words = builder.or_(builder.lshr(even, _SIXTEEN), odd)
                store_vector(builder, words, outputs, v)
        with otherwise:
            for v, total in enumerate(totals):
                store_vector(builder, total, sums, v, 4)


def _scaling(step: Step) -> Any:
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
        kind = _WORDS if is_bfloat16 else _FLOATS
        vectors = width.count // 2 if is_bfloat16 else width.count

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def at(number: int, of: Any) -> Any:
                array, index = arguments[number : number + 2]
                return vectors_at(context, builder, of, signature.args[number], array, index)

            def scalar(number: int, index: Any) -> Any:
                kind, array = signature.args[number], arguments[number]
                return builder.load(element_pointer(context, builder, kind, array, index))

            panel = at(7, kind)

            def body(entry: Any, totals: Sums) -> Sums:
                column = builder.zext(scalar(9, entry), _I64)
                offset = builder.mul(column, ir.Constant(_I64, vectors))
                feature = builder.gep(panel, [offset])
                return step(builder, scalar(10, entry), feature, totals)

            start, is_first, is_last = arguments[4:7]
            first = _start_sums(builder, is_first, start, at(2, _FLOATS), width.count)
            totals = for_entries(builder, arguments[11], arguments[12], first, body)
            _finish_sums(builder, is_last, totals, at(2, _FLOATS), at(0, kind), is_bfloat16)
            return context.get_dummy_value()

        places = (outputs, types.intp, sums, types.intp, types.float32, types.boolean)
        source = (types.boolean, inputs, types.intp, columns, values, types.intp, types.intp, width)
        return types.void(*places, *source), generate

    return add_scaled


add_scaled_floats = _scaling(_scale_floats)
"""In a kernel: add to the sums of a row of outputs its entries times the features of their columns.

Arguments: outputs and where the row begins there; float32 sums and where (the outputs themselves,
if these are float32); the start of the sums; whether they start here; whether they end here and go
to the outputs, rounded; inputs and where the columns begin there; local columns, uint16; float32
values; the first entry and the end; `width`.
"""
add_scaled_unpacked = _scaling(_scale_unpacked)
"""The same for panels of bfloat16 patterns, on any processor."""
add_scaled_by_dots = _scaling(_scale_by_dots)
"""The same with the processor's dot product of bfloat16 pairs; values must be bfloat16 values.

It takes denormals for 0, and an infinite or undefined token makes its neighbour undefined too.
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
