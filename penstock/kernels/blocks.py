"""How a flat array is cut: blocks for threads, strides of whole vectors, and a masked tail.

The cuts depend on the length alone. Whatever is summed is summed per granule and the granules' sums
are then added exactly, so no result ever depends on how many threads there are.

A stride is two vectors: one or two whole cache lines of every array. The optimizers, which walk
through up to five arrays at once, ask for the lines that lie `AHEAD` of the present one: measured,
this brings them a few percent nearer to the memory's limit. Looking further ahead made it worse.
"""

from penstock.kernels.compilation import inlined
from penstock.kernels.vectors import LANES

BLOCK_LENGTH = 65536
"""Elements per block; the work of one turn of a parallel loop."""

GRANULE = 4096
"""Elements whose squares are summed by themselves. Whoever cuts a weight into pieces cuts it at a
multiple of this, and then has the same sums, whatever the pieces."""

STRIDE = 2 * LANES
"""Elements per turn of an inner loop."""

AHEAD = 64
"""How many elements ahead an optimizer fetches."""


@inlined
def block_count(length):
    """The number of blocks of an array of `length` elements."""
    return (length + BLOCK_LENGTH - 1) // BLOCK_LENGTH


@inlined
def granule_bounds(begin, block_end):
    """Of the granule that begins there: the end of its whole strides, and its end."""
    last = min(begin + GRANULE, block_end)
    return last - (last - begin) % STRIDE, last


@inlined
def block_bounds(block, length):
    """Of block number `block`: its first element, the end of its whole strides, its end."""
    first = block * BLOCK_LENGTH
    last = min(first + BLOCK_LENGTH, length)
    return first, last - (last - first) % STRIDE, last
