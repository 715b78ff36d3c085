"""Explicit vectors of the gradient of a sparse matrix: products of tokens at the mask's entries.

The gradients of a row of outputs stay in registers while the row's entries pass by. Each entry
takes one load and one multiply-add per 16 tokens (32 of bfloat16). Four entries are multiplied
together, so that no multiply-add waits for the one before it, and their lanes are summed together,
by shuffles in registers. Of the entries that remain at the end of a row, up to three, two are
multiplied together and the last one alone.

Without AVX-512, several registers hold a vector. Shuffles are then a good part of the work, and
halves of a vector are added before them. There, too, sums start as products. This was measured with
AVX2 (two registers), and not on Arm (four). With AVX-512 it was not measured, and the code has none
of it.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from penstock.kernels.pair_code import dot_of_pairs, even_and_odd
from penstock.kernels.sparse_vectors import column_offsets
from penstock.kernels.vector_code import (
    Sums,
    for_entries,
    has_wide_registers,
    load_vector,
    multiply_add,
    vectors_at,
)
from penstock.kernels.vectors import (
    LANES,
    element_pointer,
    float32s,
    intrinsic,
    uint32s,
)

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = float32s.ir, uint32s.ir
_ZEROS = ir.Constant(_FLOATS, [0.0] * LANES)
_GROUP = 4  # entries that are multiplied together

_Multiply = Callable[[Any, list[Any], list[Any]], Sums]


def _sum_each(builder: Any, vectors: Sums) -> Any:
    """The sums over the lanes of four vectors, in an order that AVX-512 decides: <4 x float>.

    A sum does not depend on the other vectors.
    """

    def shuffled(a: Any, b: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))

    def folded(a: Any, b: Any, first: list[int], second: list[int]) -> Any:
        return builder.fadd(shuffled(a, b, first), shuffled(a, b, second))

    def halved(vector: Any) -> Any:
        half = vector.type.count // 2
        return folded(vector, vector, list(range(half)), list(range(half, 2 * half)))

    if not has_wide_registers():
        vectors = [halved(vector) for vector in vectors]
    lanes = vectors[0].type.count

    def in_quarters(*places: int) -> list[int]:
        return [quarter + place for quarter in range(0, lanes, 4) for place in places]

    a, b, c, d = vectors
    halves = (in_quarters(0, lanes, 1, lanes + 1), in_quarters(2, lanes + 2, 3, lanes + 3))
    pairs = folded(a, b, *halves), folded(c, d, *halves)
    total = folded(
        *pairs, in_quarters(0, 1, lanes, lanes + 1), in_quarters(2, 3, lanes + 2, lanes + 3)
    )
    while total.type.count > 4:
        total = halved(total)
    return total


def _added(builder: Any, a: Any, b: Any, total: Any) -> Any:
    """`a * b + total`, rounded once; without a total yet, the product."""
    if total is None and not has_wide_registers():
        return builder.fmul(a, b)
    return multiply_add(builder, a, b, _ZEROS if total is None else total)


def _unused() -> Any:
    """A vector whose sum is not read."""
    return _ZEROS if has_wide_registers() else ir.Constant(_FLOATS, ir.Undefined)


def _multiply_floats(builder: Any, gradient: list[Any], features: list[Any]) -> Sums:
    totals: list[Any] = [None] * len(features)
    for v, tokens in enumerate(gradient):
        totals = [
            _added(builder, tokens, load_vector(builder, feature, v, 4), total)
            for feature, total in zip(features, totals, strict=True)
        ]
    return totals


def _multiply_unpacked(builder: Any, gradient: list[Any], features: list[Any]) -> Sums:
    # Two sums, since an addition waits for the previous one.
    totals: list[tuple[Any, Any]] = [(None, None)] * len(features)
    for v, pairs in enumerate(gradient):
        left = even_and_odd(builder, pairs)
        right = [even_and_odd(builder, load_vector(builder, feature, v)) for feature in features]
        totals = [
            (_added(builder, left[0], other[0], even), _added(builder, left[1], other[1], odd))
            for other, (even, odd) in zip(right, totals, strict=True)
        ]
    return [builder.fadd(even, odd) for even, odd in totals]


def _multiply_by_dots(builder: Any, gradient: list[Any], features: list[Any]) -> Sums:
    totals = [_ZEROS] * len(features)
    for v, pairs in enumerate(gradient):
        totals = [
            dot_of_pairs(builder, total, pairs, load_vector(builder, feature, v))
            for feature, total in zip(features, totals, strict=True)
        ]
    return totals


def _multiplying(multiply: _Multiply) -> Any:
    @intrinsic
    def add_products(
        typing_context,
        totals,
        gradients,
        gradients_at,
        inputs,
        inputs_at,
        columns,
        begin,
        end,
        width,
    ):
        is_bfloat16 = inputs.dtype == types.uint16
        if gradients.dtype != inputs.dtype or (is_bfloat16 and width.count % 2):
            return None
        kind = _WORDS if is_bfloat16 else _FLOATS
        vectors = width.count // 2 if is_bfloat16 else width.count

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def address(number: int, index: Any) -> Any:
                kind, array = signature.args[number], arguments[number]
                return element_pointer(context, builder, kind, array, index)

            row, panel = (
                vectors_at(context, builder, kind, signature.args[n], *arguments[n : n + 2])
                for n in (1, 3)
            )
            gradient = [load_vector(builder, row, v) for v in range(vectors)]
            begin, end = arguments[6:8]

            def add(entry: Any, count: int) -> None:
                offsets = column_offsets(builder, address(5, entry), count, vectors)
                features = [builder.gep(panel, [offset]) for offset in offsets]
                products = multiply(builder, gradient, features)
                sums = _sum_each(builder, products + [_unused()] * (_GROUP - count))
                place = address(0, entry)
                if count == 1:
                    sums = builder.extract_element(sums, ir.Constant(_I32, 0))
                else:
                    lanes = ir.Constant(ir.VectorType(_I32, count), list(range(count)))
                    sums = builder.shuffle_vector(sums, sums, lanes)
                    place = builder.bitcast(place, sums.type.as_pointer())
                added = builder.fadd(builder.load(place, align=4), sums)
                builder.store(added, place, align=4)

            def body(count: int) -> Callable[[Any, Sums], Sums]:
                def step(entry: Any, _: Sums) -> Sums:
                    add(entry, count)
                    return []

                return step

            entry = begin
            for count in (_GROUP, _GROUP // 2, 1):
                left = builder.and_(builder.sub(end, entry), ir.Constant(_I64, -count))
                whole = builder.add(entry, left)
                for_entries(builder, entry, whole, [], body(count), count)
                entry = whole
            return context.get_dummy_value()

        places = (totals, gradients, types.intp, inputs, types.intp)
        return types.void(*places, columns, types.intp, types.intp, width), generate

    return add_products


add_products_of_floats = _multiplying(_multiply_floats)
"""In a kernel: add to the total of each entry of a row the sum of gradient times input over tokens.

Arguments: float32 totals `[entries]`; gradients and where the row of outputs begins there; inputs
and where the columns begin there; local columns, uint16; the first entry and the end; `width`.
"""
add_products_unpacked = _multiplying(_multiply_unpacked)
"""The same for panels of bfloat16 patterns, on any processor."""
add_products_by_dots = _multiplying(_multiply_by_dots)
"""The same with the processor's dot product of bfloat16 pairs."""
