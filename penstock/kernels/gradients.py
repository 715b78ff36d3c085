"""Copies a gradient into the store: rounded or added, squared and summed, in one pass.

The sums of squares are those of the stored values (after rounding and addition), since the
optimizer reads the stored values. float64 can square any float32 and add up 2^700 of them. A sum is
therefore finite exactly if every element is finite, and also serves as the non-finite flag. There
is one sum per `GRANULE` elements, so that pieces of a weight have the same sums as the whole.
"""

from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import overload

from penstock.kernels.arguments import require_flat
from penstock.kernels.bfloat16 import from_bfloat16, to_bfloat16
from penstock.kernels.blocks import (
    AHEAD,
    GRANULE,
    STRIDE,
    block_bounds,
    block_count,
    block_kernel,
    granule_bounds,
)
from penstock.kernels.compilation import inlined
from penstock.kernels.packed_entries import PackedEntries
from penstock.kernels.vectors import (
    LANES,
    every_lane,
    fetch,
    first_lanes,
    fma,
    load,
    splat,
    store,
    sum_lanes,
    widened,
)


def load_gradient(gradient: Any, index: Any, lanes: Any) -> Any:
    """In a kernel: return 16 float32 values of a gradient stored as float32 or as bfloat16
    patterns."""
    raise TypeError("load_gradient works only inside a kernel")


def store_gradient(gradient: Any, index: Any, value: Any, lanes: Any) -> Any:
    """In a kernel: write 16 float32 values to a gradient, rounded to its type; return the rounded
    values."""
    raise TypeError("store_gradient works only inside a kernel")


@overload(load_gradient, jit_options={"forceinline": True})
def _load_gradient(gradient, index, lanes):
    if gradient.dtype == types.uint16:
        return lambda gradient, index, lanes: from_bfloat16(load(gradient, index, lanes))
    return lambda gradient, index, lanes: load(gradient, index, lanes)


@overload(store_gradient, jit_options={"forceinline": True})
def _store_gradient(gradient, index, value, lanes):
    if gradient.dtype == types.uint16:

        def write_rounded(gradient, index, value, lanes):
            rounded = to_bfloat16(value)
            store(gradient, index, rounded, lanes)
            return from_bfloat16(rounded)

        return write_rounded

    def write(gradient, index, value, lanes):
        store(gradient, index, value, lanes)
        return value

    return write


@inlined
def _copy_at(source, destination, i, lanes, total):
    kept = widened(store_gradient(destination, i, load_gradient(source, i, lanes), lanes))
    return fma(kept, kept, total)


@inlined
def _add_at(source, destination, i, lanes, total):
    added = load_gradient(destination, i, lanes) + load_gradient(source, i, lanes)
    kept = widened(store_gradient(destination, i, added, lanes))
    return fma(kept, kept, total)


@inlined
def _square_at(gradient, _, i, lanes, total):
    value = widened(load_gradient(gradient, i, lanes))
    return fma(value, value, total)


@inlined
def _over_range(at, source, destination, begin, whole, last):
    """In a kernel: apply `at` to the elements from `begin` to `last`, whose whole strides end at
    `whole`; return the sum of its results."""
    total = splat(0.0)
    for i in range(begin, whole, STRIDE):
        fetch(source, i + AHEAD)
        fetch(destination, i + AHEAD)
        for j in range(i, i + STRIDE, LANES):
            total = at(source, destination, j, every_lane(), total)
    for i in range(whole, last, LANES):
        total = at(source, destination, i, first_lanes(last - i), total)
    return sum_lanes(total)


@inlined
def _over_granules(at, source, destination, sums, block):
    """In a kernel: apply `at` to all elements of a block; its results are summed per granule."""
    first, _, end = block_bounds(block, source.size)
    for begin in range(first, end, GRANULE):
        whole, last = granule_bounds(begin, end)
        sums[begin // GRANULE] = _over_range(at, source, destination, begin, whole, last)


@inlined
def _over_packed_granules(at, source, destination, entries, sums, granule):
    """In a kernel: like `_over_granules`, for the entries of one dense granule."""
    begin, last = entries[granule], entries[granule + 1]
    whole = last - (last - begin) % STRIDE
    sums[granule] = _over_range(at, source, destination, begin, whole, last)


@block_kernel(over="source")
def _copy(source, destination, sums):
    for block in prange(block_count(source.size)):
        _over_granules(_copy_at, source, destination, sums, block)


@block_kernel(over="source")
def _add(source, destination, sums):
    for block in prange(block_count(source.size)):
        _over_granules(_add_at, source, destination, sums, block)


@block_kernel(over="source")
def _copy_packed(source, destination, entries, sums):
    for granule in prange(entries.size - 1):
        _over_packed_granules(_copy_at, source, destination, entries, sums, granule)


@block_kernel(over="source")
def _add_packed(source, destination, entries, sums):
    for granule in prange(entries.size - 1):
        _over_packed_granules(_add_at, source, destination, entries, sums, granule)


@block_kernel(over="gradient")
def _square(gradient, sums):
    for block in prange(block_count(gradient.size)):
        _over_granules(_square_at, gradient, gradient, sums, block)


def _sums(length: int) -> np.ndarray:
    return np.empty(-(-length // GRANULE), np.float64)


def copy_gradient(source: np.ndarray, destination: np.ndarray) -> np.ndarray:
    """Write a gradient into the store's slab, rounded once to the slab's type.

    Args:
        source: float32 `[n]`.
        destination: float32 `[n]`, or uint16 `[n]` for bfloat16 patterns (ties to even).

    Returns:
        float64 `[ceil(n / GRANULE)]`: per granule the sum of the squares of the written values; not
        finite exactly if an element is not. Bit-identical for any number of threads.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    require_flat("gradient", source, source.size, np.float32)
    require_flat("gradient slab", destination, source.size, np.float32, np.uint16, write=True)
    sums = _sums(source.size)
    _copy(source, destination, sums)
    return sums


def add_gradient(source: np.ndarray, destination: np.ndarray) -> np.ndarray:
    """Add a gradient to the gradient in the store's slab: the second use of a tied weight.

    Arguments, result and errors are those of `copy_gradient`; the sums of squares are those of the
    sum. A bfloat16 slab is rounded at every addition.
    """
    require_flat("gradient", source, source.size, np.float32)
    require_flat("gradient slab", destination, source.size, np.float32, np.uint16, write=True)
    sums = _sums(source.size)
    _add(source, destination, sums)
    return sums


def copy_packed_gradient(
    source: np.ndarray, destination: np.ndarray, entry_offsets: np.ndarray
) -> np.ndarray:
    """Write the gradient of a sparse weight's entries into the store's slab.

    Args:
        source: float32 `[kept]`.
        destination: float32 `[kept]`, or uint16 `[kept]` for bfloat16 patterns (ties to even).
        entry_offsets: int64 `[granules + 1]`, the number of entries before each dense granule.

    Returns:
        float64 `[granules]`: per dense granule the sum of the squares of the written values, as
        from `copy_gradient`.

    Raises:
        ValueError: an array has another type, length or layout.
    """
    sums = _packed_sums(source, destination, entry_offsets)
    _copy_packed(source, destination, entry_offsets, sums)
    return sums


def add_packed_gradient(
    source: np.ndarray, destination: np.ndarray, entry_offsets: np.ndarray
) -> np.ndarray:
    """Add a gradient to that in the store's slab, as `add_gradient`; the rest is as for
    `copy_packed_gradient`."""
    sums = _packed_sums(source, destination, entry_offsets)
    _add_packed(source, destination, entry_offsets, sums)
    return sums


def _packed_sums(
    source: np.ndarray, destination: np.ndarray, entry_offsets: np.ndarray
) -> np.ndarray:
    require_flat("gradient", source, source.size, np.float32)
    require_flat("gradient slab", destination, source.size, np.float32, np.uint16, write=True)
    PackedEntries(entry_offsets).check(source.size)
    return np.empty(entry_offsets.size - 1, np.float64)


def sums_of_squares(gradient: np.ndarray) -> np.ndarray:
    """Return the sums of squares of a gradient, float32 or bfloat16 patterns `[n]`.

    The result is bit-identical to that of `copy_gradient` for these values.

    Raises:
        ValueError: the array has another type or layout.
    """
    require_flat("gradient", gradient, gradient.size, np.float32, np.uint16)
    sums = _sums(gradient.size)
    _square(gradient, sums)
    return sums
