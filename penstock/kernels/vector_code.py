"""Building blocks of vector code, for intrinsics that generate loops over vectors themselves.

They generate LLVM's code for vectors of 16 float32 numbers in flat arrays.
"""

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core.registry import cpu_target

from penstock.kernels.vectors import LANES, call_llvm, element_pointer, float32s

_I64 = ir.IntType(64)
_FLOATS = float32s.ir

Sums = list[Any]


@functools.cache
def processor_features() -> frozenset[str]:
    """Return the instruction sets of the processor that Numba compiles for, as LLVM names them."""
    return frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))


def has_wide_registers() -> bool:
    """Whether one register holds a vector of 16 numbers (AVX-512)."""
    return "+avx512f" in processor_features()


def vectors_at(context: Any, builder: Any, kind: Any, array_type: Any, array: Any, at: Any) -> Any:
    """Generate the address of vectors of type `kind` that begin at an element of a flat array."""
    pointer = element_pointer(context, builder, array_type, array, at)
    return builder.bitcast(pointer, kind.as_pointer())


def load_vector(builder: Any, vectors: Any, number: int, alignment: int = 2) -> Any:
    """Generate the load of a vector from the address of vectors."""
    place = builder.gep(vectors, [ir.Constant(_I64, number)])
    return builder.load(place, align=alignment)


def store_vector(builder: Any, value: Any, vectors: Any, number: int, alignment: int = 2) -> None:
    """Generate the store of a vector to the address of vectors."""
    builder.store(value, builder.gep(vectors, [ir.Constant(_I64, number)]), align=alignment)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Generate `a * b + c`, rounded once."""
    return call_llvm(builder, f"llvm.fma.v{LANES}f32", _FLOATS, [a, b, c])


def started_sums(
    builder: Any, is_first: Any, start: Callable[[], Any], kept: Callable[[], Sums]
) -> Sums:
    """Generate sums that are all `start()` where `is_first`, else what `kept()` loads."""
    with builder.if_else(is_first) as (then, otherwise):
        with then:
            first, first_block = start(), builder.block
        with otherwise:
            loaded, loaded_block = kept(), builder.block
    sums: Sums = []
    for value in loaded:
        phi = builder.phi(_FLOATS)
        phi.add_incoming(first, first_block)
        phi.add_incoming(value, loaded_block)
        sums.append(phi)
    return sums


def for_entries(
    builder: Any, begin: Any, end: Any, sums: Sums, body: Callable[[Any, Sums], Sums], step: int = 1
) -> Sums:
    """Generate `for entry in range(begin, end, step): sums = body(entry, sums)`; return the
    sums."""
    before = builder.block
    condition, inside, after = (builder.append_basic_block() for _ in range(3))
    builder.branch(condition)
    builder.position_at_end(condition)
    entry = builder.phi(_I64)
    carried = [builder.phi(total.type) for total in sums]
    builder.cbranch(builder.icmp_signed("<", entry, end), inside, after)
    builder.position_at_end(inside)
    added = body(entry, carried)
    following = builder.add(entry, ir.Constant(_I64, step))
    last = builder.block
    builder.branch(condition)
    for phi, start, later in zip(
        [entry, *carried], [begin, *sums], [following, *added], strict=True
    ):
        phi.add_incoming(start, before)
        phi.add_incoming(later, last)
    builder.position_at_end(after)
    return carried
