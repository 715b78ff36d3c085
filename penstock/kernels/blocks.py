"""How a flat array is cut: blocks for threads, strides of whole vectors, and a masked tail.

The cuts depend on the length alone. Whatever is summed is summed per block and the blocks' sums are
then added exactly, so no result ever depends on how many threads there are.

A stride is four vectors, 256 bytes of float32: visiting each array of a pass for that long before
turning to the next is measurably easier on the memory than 64 bytes at a time.
"""

from penstock.kernels.compilation import inlined
from penstock.kernels.vectors import LANES

BLOCK_LENGTH = 65536
"""Elements per block; the work of one turn of a parallel loop."""

STRIDE = 4 * LANES
"""Elements per turn of an inner loop."""


@inlined
def block_count(length):
    """The number of blocks of an array of `length` elements."""
    return (length + BLOCK_LENGTH - 1) // BLOCK_LENGTH


@inlined
def block_bounds(block, length):
    """Of block number `block`: its first element, the end of its whole strides, its end."""
    first = block * BLOCK_LENGTH
    last = min(first + BLOCK_LENGTH, length)
    return first, last - (last - first) % STRIDE, last
