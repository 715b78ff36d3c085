"""The index at rest and on the wire: the mask, in the fewer bytes of two; nothing else is read."""

import numpy as np
import pytest
from random_masks import KINDS, LENGTHS, random_mask

from penstock.errors import CorruptionError
from penstock.kernels.blocks import GRANULE
from penstock.sparsity import (
    compact_bytes,
    index_from_compact,
    index_of_mask,
    max_compact_bytes,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_mask_comes_back_from_its_compact_bytes(kind, length):
    index = index_of_mask(random_mask(kind, length, np.random.default_rng(length)))
    data = compact_bytes(index)
    assert index_from_compact(data, length, index.kept).same_mask(index)
    gaps = np.diff(index.positions(), prepend=-1) - 1
    starts = index.positions() // GRANULE * GRANULE  # every granule starts its count anew
    gaps = np.minimum(gaps, index.positions() - starts)
    table = 1 + 2 * index.granules
    halves, wholes = (gaps // 15 + 1).sum(), (gaps // 255 + 1).sum()
    assert len(data) == table + min(-(-halves // 2), wholes)
    assert len(data) <= max_compact_bytes(index.kept, length)


@pytest.mark.parametrize(
    ("sparsity", "most"), [(0.5, 0.502), (0.75, 0.511), (0.9, 0.641), (0.95, 0.948), (0.99, 1.14)]
)
def test_bytes_per_kept_entry_of_random_masks(sparsity, most):
    index = index_of_mask(np.random.default_rng(5).random(2_000_000) >= sparsity)
    assert len(compact_bytes(index)) <= most * index.kept


def table(first: int, *sizes: int) -> bytes:
    return bytes([first]) + np.array(sizes, "<u2").tobytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected 0 or 1 as the first byte, got no byte"),
        (b"\2\0\0", "expected 0 or 1 as the first byte, got 2"),
        (table(1, 3), "expected at least 5 bytes for the sizes of 2 granules, got 3"),
        (table(1, 65535, 2), "add up to 65537 bytes of codes, a mask of 3 entries has at most 19"),
        (table(1, 3, 0) + b"\0", "1 bytes are not the codes that the granules' sizes announce"),
        (table(1, 3, 0) + b"\0\0\0", "3 bytes are not the codes that the granules' sizes"),
        (table(1, 3, 0) + b"\0\x10", "2 bytes are not the codes that the granules' sizes"),
        (table(1, 3, 0) + b"\xff" * 400, "400 bytes are not the codes that the granules' sizes"),
        (table(1, 0, 3) + b"\x55\0", "elements 4096 to 4105 hold an entry beyond the last"),
        (table(1, 2, 0) + b"\0", "expected 3 kept entries, got 2"),
        (table(0, 3, 0) + b"\0\0\0", "expected codes of 4 bits, which are shorter, got codes of 8"),
        (
            table(1, 3, 0) + b"\xff\xff\x00\x00",
            "expected codes of 8 bits, which are not longer, got codes of 4",
        ),
    ],
)
def test_bytes_that_are_no_compact_index_are_refused(data, message):
    with pytest.raises(CorruptionError, match=message):
        index_from_compact(data, GRANULE + 10, 3)


@pytest.mark.parametrize("seed", range(60))
def test_damaged_bytes_are_refused_or_are_another_mask(seed):
    generator = np.random.default_rng(seed)
    length = int(generator.integers(1, 3 * GRANULE))
    index = index_of_mask(random_mask(generator.choice(KINDS), length, generator))
    data = np.frombuffer(compact_bytes(index), np.uint8).copy()
    for _ in range(generator.integers(1, 4)):
        data[generator.integers(data.size)] = generator.integers(256)
    accepted, damaged = True, index
    try:
        damaged = index_from_compact(data.tobytes(), length, index.kept)
    except CorruptionError:
        accepted = False
    assert not accepted or compact_bytes(index_of_mask(damaged.mask())) == data.tobytes(), seed
