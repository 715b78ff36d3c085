"""Division of a flat array: blocks for threads, strides of whole vectors, and a masked tail.

The division depends on the length alone. Sums are computed per granule, and the granules' sums are
added exactly, so no result depends on the number of threads. A kernel uses no more threads than its
array has blocks: on a busy machine, waiting for a second thread takes longer than a block
(`benchmarks/README.md`, "Other benchmarks").

A stride is two vectors: one or two whole cache lines of every array. The optimizers, which traverse
up to five arrays at once, prefetch the lines that are `AHEAD` of the present line: of 64, 256 and
512 elements, the distance that was best or equal on each processor measured
(`benchmarks/README.md`, "AdamW on that processor"). The copies of gradients have the same distance
("Received gradients" there).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numba

from penstock.kernels.compilation import inlined, kernel
from penstock.kernels.vectors import LANES

BLOCK_LENGTH = 65536
"""Elements per block, the work of one iteration of a parallel loop."""

GRANULE = 4096
"""Elements whose squares are summed separately. Pieces of a weight that begin at multiples of this
have the same sums, whatever the pieces."""

STRIDE = 2 * LANES
"""Elements per iteration of an inner loop."""

AHEAD = 256
"""Prefetch distance, in elements."""


def block_kernel(over: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a kernel (`kernel`) that divides an array among threads, in whole blocks.

    **Arguments:** `over` is the name of the parameter that has the array or a tuple of arrays of
    one length; the entries of a sparse weight have as many blocks as a dense array of their number.
    What Numba compiled is the decorated function's `__wrapped__`.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = kernel(function)
        place = list(inspect.signature(function).parameters).index(over)

        @functools.wraps(compiled, updated=())
        def call(*arguments: Any) -> Any:
            array = arguments[place]
            length = (array[0] if isinstance(array, tuple) else array).size
            threads = numba.get_num_threads()
            needed = max(1, block_count.py_func(length))
            if threads <= needed:
                return compiled(*arguments)
            numba.set_num_threads(needed)
            try:
                return compiled(*arguments)
            finally:
                numba.set_num_threads(threads)

        return call

    return declare


@inlined
def block_count(length):
    """The number of blocks of an array of `length` elements."""
    return (length + BLOCK_LENGTH - 1) // BLOCK_LENGTH


@inlined
def granule_bounds(begin, block_end):
    """Return, for the granule that begins there, the end of its whole strides, and its end."""
    last = min(begin + GRANULE, block_end)
    return last - (last - begin) % STRIDE, last


@inlined
def block_bounds(block, length):
    """Return, for block number `block`, its first element, the end of its whole strides, its
    end."""
    first = block * BLOCK_LENGTH
    last = min(first + BLOCK_LENGTH, length)
    return first, last - (last - first) % STRIDE, last
