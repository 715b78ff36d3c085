"""The arrays of sparse weights: their room, their length under a mask, and the dense values.

A sparse weight keeps one value per kept entry. The number of entries changes with the mask, and
never exceeds the weight's capacity, for which memory is allocated once. A shard's part of a weight
has room for its share of the capacity and some more; where its part of the mask needs more still,
the room grows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from penstock.kernels.blocks import GRANULE
from penstock.kernels.memory import allocate
from penstock.kernels.packed_entries import group_offsets, max_groups
from penstock.program import WeightSpec
from penstock.sparsity import max_bytes, max_compact_bytes

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex


def room_of(weight: WeightSpec, group: int = 1) -> int:
    """Return the number of values that a role with one value per `group` entries has room for."""
    if not weight.is_sparse:
        return -(-weight.elements // group)
    if group == 1:
        return weight.capacity
    return max_groups(weight.capacity, weight.elements, group, GRANULE)


_MORE = 16  # a part has room for a 16th more entries than its share, and for
_LEAST_MORE = 64  # so many: random masks of 1,000 entries differ by this much


def capacity_of_part(weight: WeightSpec, elements: int) -> int:
    """Return the entries that a part of so many elements of a weight has room for at first."""
    if elements == weight.elements:
        return weight.capacity
    share = -(-weight.capacity * elements // weight.elements)
    return min(share + share // _MORE + _LEAST_MORE, weight.capacity, elements)


def index_bytes_of(kept: int, elements: int) -> int:
    """Return the most bytes of such a mask on the wire."""
    return max_compact_bytes(kept, elements)


def with_room(array: np.ndarray, length: int) -> np.ndarray:
    """Return an array with room for so many values: the same one, or a larger copy."""
    if length <= array.size:
        return array
    larger = allocate((length + length // _MORE) * array.itemsize).view(array.dtype)
    larger[: array.size] = array
    return larger


def length_of(index: PackedIndex, group: int = 1) -> int:
    """Return the number of values of such a role under a mask; groups begin anew in every
    granule."""
    return index.kept if group == 1 else int(group_offsets(index.entry_offsets, group)[-1])


def index_memory(kept: int, elements: int) -> int:
    """Return the most bytes of a mask in memory, with the offsets of its granules."""
    return max_bytes(kept, elements) + 2 * 8 * (-(-elements // GRANULE) + 1)


def dense_values(
    index: PackedIndex, read: Callable[[int, int], np.ndarray], begin: int, end: int
) -> np.ndarray:
    """Return elements `begin` to `end` of a sparse weight, float32, with zeros where it has none.

    Args:
        index: its mask.
        read: returns the values of a range of entries, float32.
        begin, end: a range of elements, from the first of `index` on.
    """
    values = np.zeros(end - begin, np.float32)
    first, last = begin // GRANULE, -(-end // GRANULE)
    positions = index.cut(first, last).positions() - (index.begin + begin)
    kept = read(int(index.entry_offsets[first]), int(index.entry_offsets[last]))
    inside = slice(*np.searchsorted(positions, (0, end - begin)).tolist())
    values[positions[inside]] = kept[inside]
    return values
