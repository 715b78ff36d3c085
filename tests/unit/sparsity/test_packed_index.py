"""A packed index is the mask, in few bytes; what is no mask is refused."""

import numpy as np
import pytest
from random_masks import KINDS, LENGTHS, random_cut, random_mask
from scipy import sparse

from penstock.errors import CorruptionError
from penstock.kernels.blocks import GRANULE
from penstock.sparsity import (
    empty_index,
    expected_bytes,
    full_index,
    index_from_bytes,
    index_of_mask,
    index_of_positions,
    joined,
    max_bytes,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_mask_comes_back_from_its_index_and_from_its_bytes(kind, length):
    mask = random_mask(kind, length, np.random.default_rng(length))
    index = index_of_mask(mask)
    positions = np.flatnonzero(mask)
    np.testing.assert_array_equal(index.positions(), positions)
    np.testing.assert_array_equal(index.mask(), mask)
    assert (index.kept, index.absent) == (positions.size, length - positions.size)
    assert index_of_positions(positions, length).same_mask(index)
    data = index.to_bytes()
    assert len(data) == index.nbytes <= max_bytes(index.kept, length)
    assert index_from_bytes(data, length, index.kept).same_mask(index)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 64, 5003])
def test_compressed_rows_are_those_of_scipy(kind, rows):
    mask = random_mask(kind, rows * 13, np.random.default_rng(rows)).reshape(rows, 13)
    starts, columns = index_of_mask(mask.ravel()).rows_and_columns(rows, 13)
    expected = sparse.csr_matrix(mask)
    np.testing.assert_array_equal(starts, expected.indptr)
    np.testing.assert_array_equal(columns, expected.indices)


@pytest.mark.parametrize("seed", range(20))
def test_any_range_of_granules_is_an_index_of_its_own(seed):
    generator = np.random.default_rng(seed)
    length = int(generator.integers(1, 10 * GRANULE))
    mask = random_mask(generator.choice(KINDS), length, generator)
    index = index_of_mask(mask)
    parts = [index.cut(first, last) for first, last in random_cut(length, generator)]
    for part in parts:
        alone = index_from_bytes(part.to_bytes(), part.elements, part.kept, part.begin)
        expected = np.flatnonzero(mask[part.begin : part.end]) + part.begin
        np.testing.assert_array_equal(alone.positions(), expected)
    assert joined([part for part in parts if part.elements]).same_mask(index)


def test_at_90_percent_a_kept_entry_takes_a_byte_and_a_granule_two():
    generator = np.random.default_rng(5)
    index = index_of_mask(generator.random(2_000_000) < 0.1)
    assert index.codes.size == index.kept
    assert index.nbytes == index.kept + 2 * 489
    assert index.nbytes < 1.0055 * index.kept


@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.99, 0.999])
def test_expected_bytes_are_the_mean_over_random_masks(sparsity):
    length, generator = 300 * GRANULE + 1000, np.random.default_rng(5)
    kept = round(length * (1 - sparsity))
    found = []
    for _ in range(10):
        positions = np.sort(generator.choice(length, kept, replace=False))
        found.append(index_of_positions(positions, length).nbytes)
    expected = expected_bytes(kept, length)
    assert abs(np.mean(found) - expected) <= 0.015 * expected
    if sparsity <= 0.9:
        assert set(found) == {expected}


def test_expected_bytes_of_full_and_empty_masks():
    assert expected_bytes(5000, 5000) == full_index(5000).nbytes
    assert expected_bytes(0, 5000) == empty_index(5000).nbytes
    assert expected_bytes(0, 0) == 0
    with pytest.raises(ValueError, match=r"kept entries: expected 0 to 4, got 5"):
        expected_bytes(5, 4)


def test_the_maximum_of_bytes_is_exact():
    def most_escapes(length):  # by number of kept entries, within one granule
        kept = np.arange(length + 1)
        return np.where(kept, (length - kept) // 255, 0)

    two = most_escapes(GRANULE)
    for rest in (1, 255, 256, 1000, GRANULE):
        more = most_escapes(rest)
        most = np.zeros(GRANULE + rest + 1, np.int64)
        for kept, escapes in enumerate(more):
            best = most[kept : kept + two.size]
            np.maximum(best, two + escapes, out=best)
        length = GRANULE + rest
        assert [max_bytes(k, length) - 4 - k for k in range(length + 1)] == most.tolist()


def test_full_and_empty_masks():
    for length in LENGTHS:
        assert full_index(length).same_mask(index_of_mask(np.ones(length, np.bool_)))
        assert empty_index(length).same_mask(index_of_mask(np.zeros(length, np.bool_)))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([3, 3], "expected rising ones from 4096 to 4105, got 3"),
        ([4100, 4099], "expected rising ones from 4096 to 4105, got 4099 after 4100"),
        ([4105, 4106], "expected rising ones from 4096 to 4105, got 4106 after 4105"),
        (list(range(4096, 4107)), "expected at most 10, got 11"),
    ],
)
def test_positions_that_are_no_mask_are_refused(positions, message):
    with pytest.raises(ValueError, match=message):
        index_of_positions(np.array(positions, np.int64), 10, 4096)


def test_a_part_must_begin_at_a_granule():
    with pytest.raises(ValueError, match="begin: expected a multiple of 4096, got 100"):
        index_of_mask(np.ones(3, np.bool_), 100)
    index = full_index(3 * GRANULE)
    with pytest.raises(ValueError, match=r"expected one that begins at 4096, .* begins at 8192"):
        joined([index.cut(0, 1), index.cut(2, 3)])
    with pytest.raises(ValueError, match="expected a range within 0 to 3, got 1 to 4"):
        index.cut(1, 4)
    with pytest.raises(ValueError, match="whole weight of 2 x 4096 elements, got elements 4096 to"):
        index.cut(1, 3).rows_and_columns(2, 4096)


def table(*sizes: int) -> bytes:
    return np.array(sizes, "<u2").tobytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (table(1), "expected at least 4 bytes for the sizes of 2 granules, got 2"),
        (table(1, 0), "the sizes of the granules add up to 1 bytes of codes, got 0"),
        (table(1, 0) + b"\0\0", "the sizes of the granules add up to 1 bytes of codes, got 2"),
        (table(65535, 65535) + b"\0", "add up to 131070 bytes of codes, got 1"),
        (table(0, 11) + bytes(11), "elements 4096 to 4105 hold an entry beyond the last"),
        (table(17, 0) + b"\xff" * 16 + b"\x10", "elements 0 to 4095 hold an entry beyond the last"),
        (table(2, 0) + b"\0\xff", "elements 0 to 4095 end in an escape, and no entry follows"),
        (table(2, 0) + b"\0\0", "expected 1 kept entries, got 2"),
        (table(0, 0), "expected 1 kept entries, got 0"),
    ],
)
def test_bytes_that_are_no_mask_are_refused(data, message):
    with pytest.raises(CorruptionError, match=message):
        index_from_bytes(data, GRANULE + 10, 1)


@pytest.mark.parametrize("seed", range(60))
def test_damaged_bytes_are_refused_or_are_another_mask(seed):
    generator = np.random.default_rng(seed)
    length = int(generator.integers(1, 3 * GRANULE))
    index = index_of_mask(random_mask(generator.choice(KINDS), length, generator))
    data = np.frombuffer(index.to_bytes(), np.uint8).copy()
    for _ in range(generator.integers(1, 4)):
        data[generator.integers(data.size)] = generator.choice([0, 1, 254, 255, 16])
    accepted, damaged = True, index
    try:
        damaged = index_from_bytes(data.tobytes(), length, index.kept)
    except CorruptionError:
        accepted = False
    # One encoding per mask: whatever is accepted encodes to the same bytes again.
    assert not accepted or index_of_mask(damaged.mask()).to_bytes() == data.tobytes(), seed
