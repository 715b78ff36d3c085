"""The memory of weights: one slab per stage and role, of exactly the required size.

A role is one kind of data of a weight: its master (whole, or as two halves), its gradient, a moment
of the optimizer. All weights of a stage are adjacent in the stage's slab of each role, so that a
stage needs few allocations and is streamed sequentially. A tied weight is stored once, in the slab
of its home stage, the first stage that uses the weight.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from penstock.kernels.memory import allocate
from penstock.store.holding import Holding, home_stages
from penstock.store.packed import room_of

ALIGNMENT_BYTES = 64
"""Alignment of a weight in a slab: a cache line, which suits vector loads and copies."""


def allocate_role(
    holding: Holding, dtypes: Mapping[str, np.dtype], group: int = 1
) -> tuple[dict[str, np.ndarray], int]:
    """Allocate one role: a slab per stage, cut into one flat array per weight.

    Args:
        holding: the weights, their sizes and their home stages.
        dtypes: element type per weight; weights that are not named have no such role.
        group: elements of a weight that share a value.

    Returns:
        Per weight a zeroed flat array `[ceil(elements / group)]`, aligned to 64 bytes; and the
        bytes of all slabs. The array of a sparse weight has room for its capacity.

    Raises:
        BudgetError: a slab cannot be allocated.
    """
    arrays: dict[str, np.ndarray] = {}
    total_bytes = 0
    for sizes in _sizes(holding, dtypes, group):
        slab = allocate(_slab_bytes(sizes.values()))
        total_bytes += slab.nbytes
        begin = 0
        for name, size in sizes.items():
            arrays[name] = slab[begin : begin + size].view(dtypes[name])
            begin += _aligned(size)
    return arrays, total_bytes


def role_bytes(holding: Holding, dtypes: Mapping[str, np.dtype], group: int = 1) -> int:
    """Return the bytes of all slabs that `allocate_role` would allocate."""
    return sum(_slab_bytes(sizes.values()) for sizes in _sizes(holding, dtypes, group))


def _sizes(holding: Holding, dtypes: Mapping[str, np.dtype], group: int) -> list[dict[str, int]]:
    """Return the bytes of each weight's array, for each slab."""
    by_stage: dict[int, dict[str, int]] = {}
    for name, home in home_stages(holding).items():
        if name in dtypes:
            size = room_of(holding.weights[name], group) * dtypes[name].itemsize
            by_stage.setdefault(home, {})[name] = size
    return list(by_stage.values())


def slabs_of(arrays: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Return the slabs that contain arrays of `allocate_role`, each once, uint8 [bytes]."""
    owners: dict[int, tuple[np.ndarray, int, int]] = {}
    for array in arrays:
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        begin = array.ctypes.data
        _, first, last = owners.get(id(owner), (owner, begin, begin))
        owners[id(owner)] = (owner, min(first, begin), max(last, begin + array.nbytes))
    return [
        owner.view(np.uint8)[first - owner.ctypes.data : last - owner.ctypes.data]
        for owner, first, last in owners.values()
        if last > first
    ]


def _slab_bytes(sizes: Iterable[int]) -> int:
    """Bytes of adjacent tensors, each but the last padded to the alignment."""
    begin = end = 0
    for size in sizes:
        end = begin + size
        begin += _aligned(size)
    return end


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
