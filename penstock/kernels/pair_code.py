"""Building blocks of vector code for pairs of bfloat16 patterns, in words of 32 bits.

They generate LLVM's code for vectors of 16 words, as `penstock.kernels.vector_code`.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from penstock.kernels.vector_code import processor_features
from penstock.kernels.vectors import LANES, call_llvm, float32s, uint32s

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_FLOATS, _WORDS = float32s.ir, uint32s.ir
_SHORTS = ir.VectorType(_I16, 2 * LANES)
_HIGH_HALF = ir.Constant(_WORDS, [-65536] * LANES)
_SIXTEEN = ir.Constant(_WORDS, [16] * LANES)


def has_bfloat16_dot() -> bool:
    """Whether the processor has the dot product of bfloat16 pairs."""
    return "+avx512bf16" in processor_features()


def even_and_odd(builder: Any, words: Any) -> tuple[Any, Any]:
    """Generate the float32 values of the even and of the odd ones of 32 bfloat16 patterns."""
    even = builder.bitcast(builder.shl(words, _SIXTEEN), _FLOATS)
    return even, builder.bitcast(builder.and_(words, _HIGH_HALF), _FLOATS)


def dot_of_pairs(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Generate `total` plus, lane by lane, the products of two pairs of bfloat16 patterns.

    The higher product is added first, each is rounded once, and denormals are taken for 0.
    """
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return call_llvm(builder, name, _FLOATS, [total, a, b])


def shuffled(builder: Any, a: Any, b: Any, places: Sequence[int]) -> Any:
    """Generate the 32 patterns at some places of two vectors of words, of 64 patterns."""
    shorts = (builder.bitcast(words, _SHORTS) for words in (a, b))
    lanes = ir.Constant(ir.VectorType(_I32, 2 * LANES), list(places))
    return builder.bitcast(builder.shuffle_vector(*shorts, lanes), _WORDS)


def rounded(builder: Any, values: Any) -> Any:
    """Generate the bfloat16 patterns nearest to float32 values, in the high halves of words.

    Ties go to even, every NaN to 0x7FC0, as in `penstock.kernels.bfloat16`.
    """
    bits = builder.bitcast(values, _WORDS)
    odd = builder.and_(builder.lshr(bits, _SIXTEEN), ir.Constant(_WORDS, [1] * LANES))
    up = builder.add(builder.add(bits, ir.Constant(_WORDS, [0x7FFF] * LANES)), odd)
    no_number = builder.fcmp_unordered("uno", values, values)
    nan = ir.Constant(_WORDS, [0x7FC00000] * LANES)
    return builder.and_(builder.select(no_number, nan, up), _HIGH_HALF)


def joined(builder: Any, lower: Any, higher: Any) -> Any:
    """Generate the pairs of two results of `rounded`, one for the lower and one for the higher
    halves."""
    return builder.or_(builder.lshr(lower, _SIXTEEN), higher)
