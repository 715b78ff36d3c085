"""Policies over whole runs: when masks change, by how much, and that numbers stay exact."""

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.sparsity import (
    ChangeTimes,
    CountChange,
    Densify,
    DropFraction,
    MaskChange,
    MaskSize,
    Order,
    RigL,
    SparseEvolutionaryTraining,
    StaticMasks,
    absent_histogram,
    apply_change,
    drop_fraction_at,
    exchanging,
    gradual_magnitude,
    kept_histogram,
    merged_histogram,
    narrowed,
    random_index,
    require_exact,
)

MASKS = {"a": MaskSize(10_000, 1000), "b": MaskSize(500, 450)}
TIMES, FRACTION = ChangeTimes(0, 750, 100), DropFraction(0.3, 750)


def updates(policy, masks, steps=1000):
    """All changes over a run, applied to the sizes of the masks."""
    found, masks = {}, dict(masks)
    for step in range(1, steps + 1):
        update = policy.at(step, masks)
        if update is None:
            continue
        assert update.step == step
        assert policy.may_change(step)
        found[step] = update
        for change in update.changes:
            size = masks[change.weight]
            masks[change.weight] = MaskSize(size.elements, size.kept - change.drop + change.grow)
    return found, masks


def test_static_masks_never_change():
    assert updates(StaticMasks(), MASKS) == ({}, MASKS)
    assert not any(StaticMasks().needs_dense_gradients(step) for step in range(1000))
    assert not any(StaticMasks().may_change(step) for step in range(1000))


def test_gradual_magnitude_goes_from_dense_to_the_sparsity_between_a_quarter_and_three():
    dense = {name: MaskSize(size.elements, size.elements) for name, size in MASKS.items()}
    policy = gradual_magnitude({"a": 0.1, "b": 0.5}, 1000, every=60)
    found, after = updates(policy, dense)
    assert list(found) == [310, 370, 430, 490, 550, 610, 670, 730, 750]
    assert {name: size.kept for name, size in after.items()} == {"a": 1000, "b": 250}
    kept = 10_000
    for step, update in found.items():
        change = next(each for each in update.changes if each.weight == "a")
        kept -= change.drop
        assert kept == round(10_000 * (1 - 0.9 * (1 - (1 - (step - 250) / 500) ** 3)))
        assert change.grow == 0
        assert not update.replaces_update
        assert not policy.needs_dense_gradients(step)


def test_gradual_magnitude_that_ends_before_the_first_step_prunes_at_the_first():
    policy = gradual_magnitude({"a": 0.1}, 1000, begin=0, end=0, shape="constant")
    update = policy.at(1, {"a": MaskSize(1000, 1000)})
    assert update is not None
    assert [(change.weight, change.drop) for change in update.changes] == [("a", 900)]
    assert policy.at(2, {"a": MaskSize(1000, 1000)}) is None


def test_gradual_magnitude_must_end_within_the_run_and_keep_an_entry():
    with pytest.raises(ConfigError, match="step 1200 is outside the run of 1000 steps"):
        gradual_magnitude({"a": 0.1}, 1000, end=1200)
    policy = gradual_magnitude({"tiny": 0.1}, 1000)
    with pytest.raises(ConfigError, match="the mask of tiny would keep no entry"):
        policy.at(750, {"tiny": MaskSize(4, 4)})


@pytest.mark.parametrize(
    ("kind", "order"), [(SparseEvolutionaryTraining, Order.RANDOM), (RigL, Order.LARGEST)]
)
def test_exchanges_follow_the_drop_fraction_and_keep_the_numbers(kind, order):
    policy = kind(TIMES, FRACTION)
    found, after = updates(policy, MASKS)
    assert list(found) == [100, 200, 300, 400, 500, 600, 700]
    assert after == MASKS
    for step, update in found.items():
        count = int(drop_fraction_at(FRACTION, step) * 1000)
        assert CountChange("a", count, count) in update.changes
        # 450 of 500 are kept: no more than the 50 absent ones can be grown.
        small = min(50, int(drop_fraction_at(FRACTION, step) * 450))
        assert CountChange("b", small, small) in update.changes
        assert update.grow_order is order
        assert update.replaces_update is (kind is RigL)
    dense = [step for step in range(1, 1001) if policy.needs_dense_gradients(step)]
    assert dense == (list(found) if kind is RigL else [])


@pytest.mark.parametrize("kind", [SparseEvolutionaryTraining, RigL])
def test_exchanges_of_a_run_end_after_three_quarters_by_default(kind):
    assert exchanging(kind, 1000) == kind(TIMES, FRACTION)
    found, _ = updates(exchanging(kind, 1000, begin=0.5, end=900, every=150), MASKS)
    assert list(found) == [500, 650, 800]
    with pytest.raises(ConfigError, match="step 1001 is outside the run of 1000 steps"):
        exchanging(kind, 1000, end=1001)


def test_steps_between_changes_change_nothing():
    policy = Densify(SparseEvolutionaryTraining(TIMES, FRACTION), 900)
    assert [step for step in range(1, 1001) if policy.may_change(step)] == [
        *range(100, 750, 100),
        900,
    ]


def test_a_change_without_entries_is_none():
    assert RigL(TIMES, FRACTION).at(100, {"a": MaskSize(100, 2)}) is None
    assert SparseEvolutionaryTraining(TIMES, FRACTION).at(100, {"a": MaskSize(100, 100)}) is None


def test_densify_lifts_all_masks_at_its_step_and_ends_the_policy():
    policy = Densify(RigL(TIMES, FRACTION), 350)
    found, after = updates(policy, MASKS)
    assert list(found) == [100, 200, 300, 350]
    assert found[350].changes == (CountChange("a", 0, 9000), CountChange("b", 0, 50))
    assert found[350].grows_all
    assert all(size.absent == 0 for size in after.values())
    dense = [step for step in range(1, 1001) if policy.needs_dense_gradients(step)]
    assert dense == [100, 200, 300]
    assert Densify(StaticMasks(), 5).at(5, {"a": MaskSize(10, 10)}) is None


def decided(selection, histogram):
    while not selection.is_decided:
        selection = narrowed(selection, merged_histogram([histogram(selection)]))
    return selection


@pytest.mark.parametrize(
    ("policy", "kept_before", "kept_after"),
    [
        (gradual_magnitude({"w": 0.1}, 100, every=10), 9000, 900),
        (SparseEvolutionaryTraining(ChangeTimes(0, 75, 10), DropFraction(0.3, 75)), 900, 900),
        (RigL(ChangeTimes(0, 75, 10), DropFraction(0.3, 75)), 900, 900),
        (
            Densify(SparseEvolutionaryTraining(ChangeTimes(0, 75, 10), DropFraction(0.3, 75)), 60),
            900,
            9000,
        ),
    ],
    ids=["gmp", "set", "rigl", "densify"],
)
def test_a_run_of_changes_against_dense_numpy(policy, kept_before, kept_after):
    """Values and moments of a packed weight and of a dense one with a mask stay the same."""
    generator = np.random.default_rng(0)
    index = random_index(1, "w", 9000, kept_before)
    mask = index.mask()
    weight = np.where(mask, generator.standard_normal(9000), 0).astype(np.float32)
    moment = np.where(mask, generator.standard_normal(9000), 0).astype(np.float32)
    values, moments = weight[mask], moment[mask]
    changes = 0
    for step in range(1, 101):
        update = policy.at(step, {"w": MaskSize(9000, index.kept)})
        if update is None:
            continue
        changes += 1
        (count,) = update.changes
        gradient = generator.standard_normal(9000).astype(np.float32)
        drop, grow = update.selections(7, count)
        here, packed = index, values
        drop = decided(drop, lambda s, i=here, v=packed: kept_histogram(s, i, v))
        grow = decided(grow, lambda s, i=here, g=gradient: absent_histogram(s, i, g))
        change = MaskChange("w", index.kept, drop, grow)
        remap = apply_change(change, index, values, gradient)
        require_exact(change, [remap])

        order = np.argsort(np.abs(weight[mask]), kind="stable")[: count.drop]
        dropped = np.flatnonzero(mask)[order]
        absent = np.flatnonzero(~mask)
        after = mask.copy()
        after[dropped] = False
        if update.grow_order is Order.LARGEST:
            by = np.argsort(-np.abs(gradient[absent]), kind="stable")[: count.grow]
            after[absent[by]] = True
        else:
            after |= remap.index.mask() & ~mask  # which ones is random; only the number is exact
            assert int((after & ~mask).sum()) == count.grow
        np.testing.assert_array_equal(remap.index.mask(), after)
        weight[~(mask & after)] = moment[~(mask & after)] = 0
        mask, index = after, remap.index
        values, moments = remap.move(values), remap.move(moments)
        np.testing.assert_array_equal(values, weight[mask])
        np.testing.assert_array_equal(moments, moment[mask])
        # The optimizer goes on: no two magnitudes are equal at the next change.
        weight[mask] = values = values + generator.standard_normal(index.kept).astype(np.float32)
    assert changes >= 5
    assert index.kept == kept_after
