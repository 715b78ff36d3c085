"""Initial masks: exact numbers, the right distribution, the same for any number of shards."""

import numpy as np
import pytest
from random_masks import first_of, random_cut
from scipy import stats

from penstock.errors import ConfigError
from penstock.sparsity import (
    balanced_index,
    densities,
    joined,
    kept_count,
    magnitude_index,
    random_index,
    selection_key,
)

SHAPES = {"q": (64, 64), "up": (256, 64), "small": (8, 4), "conv": (32, 16, 3, 3)}


@pytest.mark.parametrize("kept", [1, 57, 8000, 19_999, 20_000])
@pytest.mark.parametrize("seed", range(2))
def test_a_random_mask_has_exactly_the_entries_with_the_least_keys(kept, seed):
    index = random_index(seed, "a.weight", 20_000, kept)
    key = selection_key(seed, "a.weight", 0, "initial mask")
    expected = first_of("random", key, kept, np.arange(20_000))
    np.testing.assert_array_equal(index.positions(), expected)


@pytest.mark.parametrize("seed", range(8))
def test_shards_make_their_parts_of_the_same_mask(seed):
    generator = np.random.default_rng(seed)
    rows, columns = int(generator.integers(1, 200)), int(generator.integers(1, 200))
    elements = rows * columns
    kept = int(generator.integers(1, elements + 1))
    cut = [part for part in random_cut(elements, generator) if part[0] < part[1]]
    print(f"{rows} x {columns}, kept {kept}, parts {cut}")
    for make in (
        lambda part: random_index(seed, "w", elements, kept, part),
        lambda part: balanced_index(seed, "w", (rows, columns), kept, part),
    ):
        whole = make(None)
        assert whole.kept == kept
        assert joined([make(part) for part in cut]).same_mask(whole)


def test_random_masks_differ_by_seed_and_name_and_are_spread_evenly():
    first = random_index(0, "a", 100_000, 10_000)
    for other in (random_index(1, "a", 100_000, 10_000), random_index(0, "b", 100_000, 10_000)):
        both = int((first.mask() & other.mask()).sum())
        assert stats.binomtest(both, 10_000, 0.1).pvalue > 1e-6
    assert stats.chisquare(np.diff(first.entry_offsets[:-1])).pvalue > 1e-6


@pytest.mark.parametrize("values", ["normal", "rounded", "zeros"])
def test_the_greatest_magnitudes_are_kept(values):
    generator = np.random.default_rng(3)
    weight = generator.standard_normal(9000).astype(np.float32)
    if values == "rounded":
        weight = np.round(weight, 1)
    elif values == "zeros":
        weight[:] = 0
    index = magnitude_index(5, "w", weight, 900)
    key = selection_key(5, "w", 0, "initial mask")
    dropped = first_of("smallest", key, 8100, np.arange(9000), weight)
    assert index.kept == 900
    np.testing.assert_array_equal(np.flatnonzero(~index.mask()), dropped)


@pytest.mark.parametrize(
    ("shape", "kept"), [((64, 100), 640), ((64, 100), 700), ((64, 10, 10), 64), ((9, 9), 80)]
)
def test_every_row_has_equally_many(shape, kept):
    index = balanced_index(1, "w", shape, kept)
    per_row = index.mask().reshape(shape[0], -1).sum(1)
    assert per_row.sum() == index.kept == kept
    assert per_row.max() - per_row.min() <= 1
    if kept % shape[0]:  # which rows have more is drawn, not the first ones
        assert np.flatnonzero(per_row == per_row.max()).tolist() != list(range(kept % shape[0]))


def test_columns_are_balanced_where_rows_are_too_short():
    index = balanced_index(1, "w", (4000, 8), 400)
    per_column = index.mask().reshape(4000, 8).sum(0)
    assert per_column.tolist() == [50] * 8
    rows = np.flatnonzero(index.mask().reshape(4000, 8).any(1))
    assert stats.kstest(rows / 4000, "uniform").pvalue > 1e-6


def test_erdos_renyi_kernel_densities_follow_the_dimensions():
    found = densities("erdos_renyi_kernel", SHAPES, 0.8)
    elements = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    kept = sum(found[name] * elements[name] for name in SHAPES)
    assert kept == pytest.approx(0.2 * sum(elements.values()), rel=1e-12)
    assert found["small"] == 1.0  # (8 + 4) / 32 of the common factor would be above 1
    factors = [found[name] / (sum(SHAPES[name]) / elements[name]) for name in ("q", "up", "conv")]
    assert factors == pytest.approx([factors[0]] * 3, rel=1e-12)


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("seed", range(5))
def test_densities_keep_the_total_and_are_clipped_to_dense(sparsity, seed):
    generator = np.random.default_rng(seed)
    shapes = {
        f"w{i}": tuple(generator.integers(2, 300, generator.integers(2, 4)).tolist())
        for i in range(10)
    }
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    for distribution in ("uniform", "erdos_renyi_kernel"):
        found = densities(distribution, shapes, sparsity)
        assert max(found.values()) <= 1
        assert min(found.values()) > 0
        kept = sum(found[name] * int(np.prod(shape)) for name, shape in shapes.items())
        assert kept == pytest.approx((1 - sparsity) * total, rel=1e-9), (shapes, found)


def test_counts_are_rounded_to_the_nearest_and_never_none():
    assert [kept_count("w", 10, density) for density in (0.14, 0.16, 1.0)] == [1, 2, 10]
    with pytest.raises(ConfigError, match="the mask of w would keep no entry"):
        kept_count("w", 10, 0.04)
    for make in (
        lambda: random_index(0, "w", 10, 0),
        lambda: balanced_index(0, "w", (2, 5), 0),
        lambda: magnitude_index(0, "w", np.ones(10, np.float32), 0),
    ):
        with pytest.raises(ConfigError, match="the mask of w would keep no entry"):
            make()


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="distribution 'erk' is not known; choose one of uniform"):
        densities("erk", SHAPES, 0.5)
    with pytest.raises(ConfigError, match=r"share of absent entries from 0 to below 1, .*got 1\.2"):
        densities("uniform", SHAPES, 1.2)
    with pytest.raises(ValueError, match="expected at most 10, got 11"):
        balanced_index(0, "w", (2, 5), 11)
    with pytest.raises(ValueError, match="expected at least 11 entries to select from, got 10"):
        random_index(0, "w", 10, 11)
    with pytest.raises(ValueError, match="expected a range within 0 to 1, got 0 to 2"):
        random_index(0, "w", 10, 1, (0, 2))
