"""Arrays as bare pointers inside kernels.

Numba allows negative indices of an array, and passes seven values for an array in each call. A
pointer has neither cost, and no length: its user answers for every index.
"""

from typing import Any

from numba.core import types
from numba.extending import intrinsic


def _pointer_to(typing_context: Any, array: Any) -> Any:
    if not isinstance(array, types.Array) or array.layout != "C":
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), generate


pointer_to: Any = intrinsic(_pointer_to)
"""In a kernel: the pointer to the first element of a contiguous array, which must outlive it."""
