"""The masks at the start of a run: how many entries each weight keeps, and which.

A mask is a function of the seed and the weight's name. Numbers of kept entries are exact. A shard
makes the part of its granules without asking others; the bits do not depend on the division.
"""

import math
from collections.abc import Mapping

import numpy as np

from penstock.errors import ConfigError
from penstock.kernels.blocks import GRANULE
from penstock.kernels.compilation import serial_kernel
from penstock.kernels.position_keys import key_words, position_key
from penstock.sparsity.mask_change import MaskChange, apply_change, require_not_empty
from penstock.sparsity.packed_index import (
    PackedIndex,
    empty_index,
    full_index,
    granule_count,
    index_of_mask,
)
from penstock.sparsity.radix_selection import (
    Order,
    begin_selection,
    select,
    select_absent,
    selection_key,
)
from penstock.sparsity.sparsity_schedules import require_sparsity

_PURPOSE = "initial mask"


def kept_count(weight: str, elements: int, density: float) -> int:
    """Return the number of entries that a weight keeps at a density, rounded to the nearest.

    Raises:
        ConfigError: that is none.
    """
    kept = min(elements, math.floor(elements * density + 0.5))
    require_not_empty(weight, kept)
    return kept


def uniform_densities(shapes: Mapping[str, tuple[int, ...]], sparsity: float) -> dict[str, float]:
    """Return the same density for every weight.

    Raises:
        ConfigError: the sparsity is not from 0 to below 1.
    """
    require_sparsity("sparsity", sparsity)
    return dict.fromkeys(shapes, 1 - sparsity)


def erdos_renyi_kernel_densities(
    shapes: Mapping[str, tuple[int, ...]], sparsity: float
) -> dict[str, float]:
    """Return densities in proportion to (sum of the dimensions) / (product of the dimensions).

    Evci et al., "Rigging the Lottery: Making All Tickets Winners", 2020, section 3. Weights whose
    density would exceed 1 are dense, and the others are sparser, so that all together have the
    given sparsity.

    Args:
        shapes: all sparse weights.
        sparsity: the share of absent entries in all of them together.

    Raises:
        ConfigError: the sparsity is not from 0 to below 1.
    """
    require_sparsity("sparsity", sparsity)
    elements = {name: math.prod(shape) for name, shape in shapes.items()}
    raw = {name: sum(shape) / elements[name] for name, shape in shapes.items()}
    to_keep = (1 - sparsity) * sum(elements.values())
    dense: set[str] = set()
    while len(dense) < len(shapes):
        sparse = [name for name in shapes if name not in dense]
        left = to_keep - sum(elements[name] for name in dense)
        factor = left / math.fsum(raw[name] * elements[name] for name in sparse)
        beyond = {name for name in sparse if factor * raw[name] > 1}
        if not beyond:
            return {name: 1.0 if name in dense else factor * raw[name] for name in shapes}
        # The densest first, as in the authors' code: others may then stay below 1.
        highest = max(raw[name] for name in beyond)
        dense |= {name for name in beyond if raw[name] == highest}
    return dict.fromkeys(shapes, 1.0)


def random_index(
    seed: int,
    weight: str,
    elements: int,
    kept: int,
    granules: tuple[int, int] | None = None,
) -> PackedIndex:
    """Return a mask of `kept` entries, every set of which is equally likely.

    Args:
        seed: seed of the run.
        weight: name of the weight.
        elements: number of elements of the whole weight.
        kept: number of kept entries of the whole weight.
        granules: the range of granules to return, of a shard; None for the whole weight.

    Raises:
        ConfigError: `kept` is 0.
        ValueError: `kept` is above `elements`, or the range is not within the weight.
    """
    require_not_empty(weight, kept)
    whole = empty_index(elements)
    key = selection_key(seed, weight, 0, _PURPOSE)
    grow = select_absent(Order.RANDOM, key, kept, whole)
    change = MaskChange(weight, 0, begin_selection(Order.RANDOM, key, 0), grow)
    return apply_change(change, whole.cut(*_range(granules, elements))).index


def magnitude_index(seed: int, weight: str, values: np.ndarray, kept: int) -> PackedIndex:
    """Return the mask of the `kept` entries of the greatest magnitude; equal ones at random.

    For a weight whose parts lie in several shards, select the entries of their `full_index` to drop
    from merged histograms (`radix_selection.py`); the mask is the same.

    Args:
        seed: seed of the run.
        weight: name of the weight.
        values: float32 `[elements]` or bfloat16 patterns, the whole weight.
        kept: number of kept entries.

    Raises:
        ConfigError: `kept` is 0.
        NonFiniteError: a value is NaN or infinite.
        ValueError: `kept` is above the number of elements, or the values have another layout.
    """
    require_not_empty(weight, kept)
    whole = full_index(values.size)
    key = selection_key(seed, weight, 0, _PURPOSE)
    drop = select(Order.SMALLEST, key, values.size - kept, whole, values)
    change = MaskChange(weight, values.size, drop, begin_selection(Order.RANDOM, key, 0))
    return apply_change(change, whole, values).index


def balanced_index(
    seed: int,
    weight: str,
    shape: tuple[int, ...],
    kept: int,
    granules: tuple[int, int] | None = None,
) -> PackedIndex:
    """Return a mask with equally many kept entries in every row, up to one.

    If there are fewer kept entries than rows, and not than columns, the columns are balanced
    instead. Which rows have one more, and which entries of a row are kept, is random.

    Args:
        seed: seed of the run.
        weight: name of the weight.
        shape: shape of the whole weight; the rows are its first dimension, the columns the product
            of the others.
        kept: number of kept entries of the whole weight.
        granules: the range of granules to return, of a shard; None for the whole weight.

    Raises:
        ConfigError: `kept` is 0.
        ValueError: `kept` is above the number of elements, or the range is not within the weight.
    """
    require_not_empty(weight, kept)
    rows, columns = shape[0], math.prod(shape[1:])
    if kept > rows * columns:
        raise ValueError(f"kept entries: expected at most {rows * columns}, got {kept}")
    first, last = _range(granules, rows * columns)
    begin = first * GRANULE
    mask = np.zeros(min(last * GRANULE, rows * columns) - begin, np.bool_)
    by_column = columns <= kept < rows
    lines, length = (columns, rows) if by_column else (rows, columns)
    step, next_line = (columns, 1) if by_column else (1, columns)
    more = np.zeros(lines, np.bool_)
    if kept % lines:
        which = random_index(seed, f"{weight}/lines", lines, kept % lines)
        more[which.positions()] = True
    words = key_words(selection_key(seed, weight, 0, _PURPOSE))
    _fill_lines(mask, begin, more, kept // lines, length, step, next_line, *words)
    return index_of_mask(mask, begin)


@serial_kernel
def _fill_lines(mask, begin, more, least, length, step, next_line, low, high):
    keys = np.empty(length, np.uint64)
    end = begin + mask.size
    for line in range(more.size):
        first = line * next_line
        kept = least + more[line]
        if kept == 0 or first >= end or first + (length - 1) * step < begin:
            continue
        for i in range(length):
            keys[i] = position_key(first + i * step, low, high)
        greatest = np.sort(keys)[kept - 1]
        for i in range(length):
            position = first + i * step
            if begin <= position < end and keys[i] <= greatest:
                mask[position - begin] = True


def _range(granules: tuple[int, int] | None, elements: int) -> tuple[int, int]:
    whole = (0, granule_count(elements))
    if granules is None:
        return whole
    if not 0 <= granules[0] <= granules[1] <= whole[1]:
        raise ValueError(
            f"granules: expected a range within 0 to {whole[1]}, got {granules[0]} to {granules[1]}"
        )
    return granules


INITIAL_DENSITIES = {
    "uniform": uniform_densities,
    "erdos_renyi_kernel": erdos_renyi_kernel_densities,
}
"""How many entries each weight keeps, by the name in the configuration."""


def densities(
    distribution: str, shapes: Mapping[str, tuple[int, ...]], sparsity: float
) -> dict[str, float]:
    """Return the densities of all sparse weights.

    Raises:
        ConfigError: the distribution is not known, or the sparsity is not from 0 to below 1.
    """
    if distribution not in INITIAL_DENSITIES:
        raise ConfigError(
            f"sparsity: distribution {distribution!r} is not known; choose one of "
            f"{', '.join(INITIAL_DENSITIES)}"
        )
    return INITIAL_DENSITIES[distribution](shapes, sparsity)
