"""Products of small matrices that lie in a cache: the inner loops of attention.

A tile of the result, some rows times some vectors of 16 columns, stays in registers while the depth
passes by: a step loads the vectors of one row of the right factor, and multiplies them by one
element of each row of the left one. Every element of the result is the sum of its products in the
order of the depth, by fused multiply-adds. So the shape of tiles changes no bit.

Factors are float32, or words of two bfloat16 patterns, of which the processor makes dot products.
Pairs lie along the depth, and the higher product of a pair is added first.

The shape is a constant of the compiled code: it is the lengths of two tuples, `rows` and `width`.
"""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import overload

from penstock.kernels.compilation import inlined
from penstock.kernels.pair_code import dot_of_pairs
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

TILE_ROWS = 4
"""Rows of a tile."""

_I64 = ir.IntType(64)
_FLOATS = float32s.ir
_ZEROS = ir.Constant(_FLOATS, [0.0] * LANES)


def tile_width(vectors: int) -> int:
    """Return how many of `vectors` vectors of columns a tile has: a divisor of them.

    With AVX-512 up to five, which with four rows take 26 of 32 registers. Elsewhere a vector of 16
    numbers takes two or four registers, so a tile has one.
    """
    if not has_wide_registers():
        return 1
    return max(width for width in (1, 2, 3, 4, 5) if vectors % width == 0)


def numbers_per_element(factor: Any) -> int:
    """In a kernel: return the numbers of an element of a factor: 1 or, of a word, 2."""
    raise TypeError("numbers_per_element works only inside a kernel")


@overload(numbers_per_element, jit_options={"forceinline": True})
def _numbers_per_element(factor):
    count = 2 if factor.dtype == types.uint32 else 1
    return lambda factor: count


def _add_pairs(builder: Any, factor: Any, vector: Any, total: Any) -> Any:
    return dot_of_pairs(builder, total, factor, vector)


@intrinsic
def _add_tile(
    typing_context,
    c,
    c_at,
    c_stride,
    a,
    a_at,
    a_row,
    a_depth,
    b,
    b_at,
    b_stride,
    depth,
    is_fresh,
    rows,
    width,
):
    """Add a tile's products to `c`, or write them there if `is_fresh`."""
    is_paired = a.dtype == types.uint32
    if a.dtype != b.dtype or not (is_paired or a.dtype == types.float32):
        return None
    kind = uint32s.ir if is_paired else _FLOATS
    add = _add_pairs if is_paired else multiply_add

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        c_at, c_stride = arguments[1:3]
        a_at, a_row, a_depth = arguments[4:7]
        b_at, b_stride, depth, is_fresh = arguments[8:12]
        count, vectors = rows.count, width.count

        def place(row: int) -> Any:
            at = builder.add(c_at, builder.mul(c_stride, ir.Constant(_I64, row)))
            return vectors_at(context, builder, _FLOATS, signature.args[0], arguments[0], at)

        places = [place(row) for row in range(count)]
        sums = started_sums(
            builder,
            is_fresh,
            lambda: _ZEROS,
            lambda: [load_vector(builder, p, v, 4) for p in places for v in range(vectors)],
        )

        def step(entry: Any, totals: Sums) -> Sums:
            right_at = builder.add(b_at, builder.mul(entry, b_stride))
            right = vectors_at(context, builder, kind, signature.args[7], arguments[7], right_at)
            loaded = [load_vector(builder, right, v, 4) for v in range(vectors)]
            added: Sums = []
            for row in range(count):
                at = builder.add(a_at, builder.mul(a_row, ir.Constant(_I64, row)))
                at = builder.add(at, builder.mul(entry, a_depth))
                pointer = element_pointer(context, builder, signature.args[3], arguments[3], at)
                factor = splat_scalar(builder, builder.load(pointer))
                own = totals[row * vectors : (row + 1) * vectors]
                added += [
                    add(builder, factor, vector, total)
                    for vector, total in zip(loaded, own, strict=True)
                ]
            return added

        sums = for_entries(builder, ir.Constant(_I64, 0), depth, sums, step)
        for row, target in enumerate(places):
            for v in range(vectors):
                store_vector(builder, sums[row * vectors + v], target, v, 4)
        return context.get_dummy_value()

    at = types.intp
    result, left, right = (c, at, at), (a, at, at, at), (b, at, at)
    return types.void(*result, *left, *right, at, types.boolean, rows, width), generate


@inlined
def add_product(c, c_at, a, a_at, a_row, a_depth, b, b_at, sizes, is_fresh, triangle, rows, width):
    """Add the product of two matrices to a third one, or write it if `is_fresh`.

    Args:
        c: float32, flat; the result `[rows, columns]` begins at `c_at`.
        a: float32 or words, flat; element (r, d) of the left factor is at
            `a_at + r * a_row + d * a_depth`.
        b: of the same type, flat; the right factor begins at `b_at`, `[depth, columns]` or, in
            words, `[depth / 2, columns]`.
        sizes: rows, a multiple of those of a tile; columns, a multiple of those of a tile; depth,
            in numbers.
        triangle: 1 if the left factor is 0 where d > r, -1 if where d < r, else 0. A triangle is
            square.
        rows, width: tuples whose lengths are the rows and the vectors of a tile.
    """
    row_count, columns, depth = sizes
    numbers = numbers_per_element(a)
    for row in range(0, row_count, len(rows)):
        begin = row // numbers if triangle < 0 else 0
        end = (row + len(rows) if triangle > 0 else depth) // numbers
        left, right = a_at + row * a_row + begin * a_depth, b_at + begin * columns
        for column in range(0, columns, LANES * len(width)):
            _add_tile(
                c, c_at + row * columns + column, columns, a, left, a_row, a_depth,
                b, right + column, columns, end - begin, is_fresh, rows, width,
            )  # fmt: skip
