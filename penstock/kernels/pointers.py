"""Arrays as bare pointers inside kernels, and a hint that a place in memory is needed soon.

Numba allows negative indices of an array, and passes seven values for an array in each call. A
pointer has neither cost, and no length: its user answers for every index.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


def _pointer_to(typing_context: Any, array: Any) -> Any:
    if not isinstance(array, types.Array) or array.layout != "C":
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), generate


pointer_to: Any = intrinsic(_pointer_to)
"""In a kernel: the pointer to the first element of a contiguous array, which must outlive it."""


def _prefetch(typing_context: Any, pointer: Any, place: Any) -> Any:
    if not (isinstance(pointer, types.CPointer) and isinstance(place, types.Integer)):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), cgutils.voidptr_t)
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        hint = builder.module.declare_intrinsic("llvm.prefetch", (cgutils.voidptr_t,), kind)
        read, keep, data_cache = (ir.Constant(word, value) for value in (0, 3, 1))
        builder.call(hint, [line, read, keep, data_cache])
        return context.get_dummy_value()

    return types.void(pointer, types.intp), generate


prefetch: Any = intrinsic(_prefetch)
"""In a kernel: have the processor load the cache line of a place, without waiting for it."""
