"""Pairs of bfloat16 patterns in kernels: words of 32 bits, whose lower half is the first number."""

from collections.abc import Callable, Sequence
from typing import Any

from numba.core import types

from penstock.kernels.pair_code import joined, rounded, shuffled
from penstock.kernels.vector_code import load_vector, vectors_at
from penstock.kernels.vectors import LANES, float32s, intrinsic, uint32s

_WORDS = uint32s.ir
_SHORTS = 2 * LANES  # of a vector of words


@intrinsic
def load_pairs(typing_context, patterns, index):
    """16 words: the 32 patterns of a flat uint16 array from `index` on."""
    if patterns.dtype != types.uint16:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = vectors_at(context, builder, _WORDS, signature.args[0], *arguments)
        return load_vector(builder, place, 0)

    return uint32s(patterns, types.intp), generate


def _of_two(kind: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    @intrinsic
    def combined(typing_context, a, b):
        if a != kind or b != kind:
            return None
        return uint32s(a, b), lambda context, builder, signature, arguments: combine(
            builder, *arguments
        )

    return combined


def _chosen(places: Sequence[int]) -> Callable[[Any, Any, Any], Any]:
    return lambda builder, a, b: shuffled(builder, a, b, places)


def _alternating(first: int) -> list[int]:
    return [vector + first + n for n in range(LANES) for vector in (0, _SHORTS)]


def _rounded_neighbours(builder: Any, a: Any, b: Any) -> Any:
    higher_halves = [vector + 2 * n + 1 for vector in (0, _SHORTS) for n in range(LANES)]
    return shuffled(builder, rounded(builder, a), rounded(builder, b), higher_halves)


first_alternating = _of_two(uint32s, _chosen(_alternating(0)))
"""In a kernel: the pairs of the first 16 patterns of two vectors of words."""
last_alternating = _of_two(uint32s, _chosen(_alternating(LANES)))
"""In a kernel: the pairs of the last 16 patterns of two vectors of words."""
rounded_pairs = _of_two(
    float32s, lambda builder, a, b: joined(builder, rounded(builder, a), rounded(builder, b))
)
"""In a kernel: the pairs of the lanes of two float32 vectors, rounded to bfloat16."""
rounded_neighbours = _of_two(float32s, _rounded_neighbours)
"""In a kernel: the pairs of neighbouring lanes of 32 float32 numbers, rounded to bfloat16."""
