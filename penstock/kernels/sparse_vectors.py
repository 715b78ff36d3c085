"""Explicit vectors of sparse products: rows of a sparse matrix against a panel of tokens.

A panel holds some tokens of all features, feature after feature: `[feature][token]`. The sums of a
row of outputs stay in registers while the row's entries pass by: one load of 16 tokens of a feature
and one multiply-add per 16 tokens. A vector of bfloat16 has 32 tokens, in two vectors of float32
sums: the even and the odd ones or, for dot products of pairs, the first and the last four of every
eight.

A multiply-add waits for the previous one of its sum. So where registers allow it
(`interleaved_rows`), several rows are interleaved: each iteration multiplies entries of every row.
No sum depends on the other rows.

The processor's dot product multiplies the features of two entries of a row at once. It adds the
higher product of a pair first, each rounded once. So the earlier entry is the higher one, and
pairing changes no sum.

The tokens of a panel are a constant of the compiled code, so that the sums are registers. They are
the length of the tuple `width`, one element per 16 tokens: a part of the signature, by which Numba
finds compiled code. (A constant of a module is not: code compiled for another one would be used.)
"""

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from penstock.kernels.pair_code import dot_of_pairs, even_and_odd, joined, rounded, shuffled
from penstock.kernels.vector_code import (
    Sums,
    for_entries,
    has_wide_registers,
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

_MOST_ROWS, _SUMS = 4, 16  # interleaved rows, and registers of their sums
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

_ARGUMENTS = (
    "outputs", "sums", "at", "bias", "is_first", "is_last", "inputs", "inputs_at",
    "segment_rows", "starts", "columns", "values", "segment",
)  # fmt: skip

_Scale = Callable[[Any, Any, list[Any], Sums], Sums]
_Join = Callable[[Any, Any, Any], Any]


def interleaved_rows(panel_tokens: int) -> int:
    """How many rows of a matrix are interleaved: as many as have registers for their sums, at least
    one.

    Without AVX-512 one row: two brought nothing on Zen 3, and were not measured on Arm.
    """
    vectors = panel_tokens // LANES
    return max(1, min(_MOST_ROWS, _SUMS // vectors)) if has_wide_registers() else 1


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


class _RowsCode:
    """Generates the sums of scaled features of consecutive segments, each of another row.

    Args:
        given: the Numba type and the value of each argument of the intrinsic, by name.
        rows, width: how many segments, and how many vectors of sums each has.
    """

    def __init__(
        self, context: Any, builder: Any, given: dict[str, tuple[Any, Any]], rows: int, width: int
    ) -> None:
        self._context, self._builder, self._given, self._width = context, builder, given, width
        is_bfloat16 = given["inputs"][0].dtype == types.uint16
        self._kind = _WORDS if is_bfloat16 else _FLOATS
        self._vectors = width // 2 if is_bfloat16 else width  # of a feature
        self._panel = self._vectors_at("inputs", given["inputs_at"][1], self._kind)
        first = given["segment"][1]
        segments = [builder.add(first, ir.Constant(_I64, n)) for n in range(rows + 1)]
        self._bounds = [self._number("starts", segment) for segment in segments]
        self._rows = [self._number("segment_rows", segment) for segment in segments[:-1]]
        tokens = ir.Constant(_I64, width * LANES)
        places = [builder.add(given["at"][1], builder.mul(row, tokens)) for row in self._rows]
        self._sums = [self._vectors_at("sums", place, _FLOATS) for place in places]
        self._outputs = [self._vectors_at("outputs", place, self._kind) for place in places]

    def generate(self, scale: _Scale, unroll: int, join: _Join | None) -> None:
        """Generate everything: the interleaved entries, then what longer rows have left.

        Args:
            scale, join: as in `_scaling`.
            unroll: entries of a row that an iteration multiplies, a power of two.
        """
        builder, width = self._builder, self._width

        def of_row(n: int, flat: Sums) -> Sums:
            return flat[n * width : (n + 1) * width]

        def add(entry: Any, count: int, totals: Sums) -> Sums:
            column = self._address("columns", entry)
            offsets = column_offsets(builder, column, count, self._vectors)
            features = [builder.gep(self._panel, [offset]) for offset in offsets]
            return scale(builder, self._address("values", entry), features, totals)

        def add_to_all(offset: Any, flat: Sums) -> Sums:
            begins = enumerate(self._bounds[:-1])
            added = [
                add(builder.add(begin, offset), unroll, of_row(n, flat)) for n, begin in begins
            ]
            return [total for totals in added for total in totals]

        # The first segment has the fewest entries.
        shortest = self._whole(builder.sub(self._bounds[1], self._bounds[0]), unroll)
        started = [total for n in range(len(self._rows)) for total in self._started(n)]
        flat = for_entries(builder, ir.Constant(_I64, 0), shortest, started, add_to_all, unroll)
        is_last = self._given["is_last"][1]
        for n, begin in enumerate(self._bounds[:-1]):
            totals, entry = of_row(n, flat), builder.add(begin, shortest)
            for count in (1,) if n == 0 or unroll == 1 else (unroll, 1):
                left = self._whole(builder.sub(self._bounds[n + 1], entry), count)
                end = builder.add(entry, left)
                body = functools.partial(lambda count, at, own: add(at, count, own), count)
                totals = for_entries(builder, entry, end, totals, body, count)
                entry = end
            _finish_sums(builder, is_last, totals, self._sums[n], self._outputs[n], join)

    def _started(self, n: int) -> Sums:
        """The sums of a row: its bias where sums start, else what lies in memory."""
        builder = self._builder
        return started_sums(
            builder,
            self._given["is_first"][1],
            lambda: splat_scalar(builder, builder.load(self._address("bias", self._rows[n]))),
            lambda: [load_vector(builder, self._sums[n], v, 4) for v in range(self._width)],
        )

    def _whole(self, entries: Any, count: int) -> Any:
        """The multiple of `count` (a power of two) in a number of entries."""
        return self._builder.and_(entries, ir.Constant(_I64, -count))

    def _number(self, name: str, index: Any) -> Any:
        return self._builder.sext(self._builder.load(self._address(name, index)), _I64)

    def _address(self, name: str, index: Any) -> Any:
        return element_pointer(self._context, self._builder, *self._given[name], index)

    def _vectors_at(self, name: str, index: Any, kind: Any) -> Any:
        return vectors_at(self._context, self._builder, kind, *self._given[name], index)


def _scaling(
    scale: _Scale, unroll: tuple[int, int], values_type: Any, join: _Join | None = None
) -> Any:
    """Generate the sums of scaled features.

    Args:
        scale: adds entries of a row to its sums, from the address of their values and those of
            their features: one entry, or as many as `unroll` says.
        unroll: entries of a row that an iteration multiplies, for one row and for interleaved rows;
            powers of two.
        join: 32 patterns, in the order of tokens, of two vectors of rounded sums; None for float32.
    """

    @intrinsic
    def add_scaled(
        typing_context,
        outputs,
        sums,
        at,
        bias,
        is_first,
        is_last,
        inputs,
        inputs_at,
        segment_rows,
        starts,
        columns,
        values,
        segment,
        rows,
        width,
    ):
        is_bfloat16 = inputs.dtype == types.uint16
        if outputs.dtype != inputs.dtype or (is_bfloat16 and width.count % 2):
            return None
        if is_bfloat16 != (join is not None) or values.dtype != values_type:
            return None

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pairs = zip(signature.args, arguments, strict=True)
            given = dict(zip(_ARGUMENTS, pairs, strict=False))
            code = _RowsCode(context, builder, given, rows.count, width.count)
            code.generate(scale, unroll[rows.count > 1], join)
            return context.get_dummy_value()

        places = (outputs, sums, types.intp, bias, types.boolean, types.boolean)
        matrix = (segment_rows, starts, columns, values, types.intp)
        return types.void(*places, inputs, types.intp, *matrix, rows, width), generate

    return add_scaled


add_scaled_floats = _scaling(_scale_floats, (4, 2), types.float32)
"""In a kernel: add to the sums of some rows of outputs their entries times the features of their
columns.

Arguments: outputs; float32 sums (the outputs themselves, if these are float32); where the first row
of the matrix is in both; float32 `bias` `[rows]`; whether the sums start here, as the bias; whether
they end here and go to the outputs, rounded; inputs and where the columns begin there; the row of
each segment; the start of each segment; local columns, uint16; float32 values; the first segment;
`rows`, a tuple with an element for each segment, of which the first has the fewest entries;
`width`.
"""
add_scaled_unpacked = _scaling(_scale_unpacked, (4, 1), types.float32, joined)
"""The same for panels of bfloat16 patterns, on any processor."""
add_scaled_by_dots = _scaling(_scale_by_dots, (2, 2), types.uint16, _join_fours)
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
