"""Updates of packed weights: no bit depends on the division, and each entry has its own age."""

import numpy as np
import pytest
from grids import thinned
from random_masks import KINDS, random_cut, random_mask

from penstock.kernels.adamw import adamw
from penstock.kernels.blocks import GRANULE
from penstock.kernels.gradients import (
    add_gradient,
    add_packed_gradient,
    copy_gradient,
    copy_packed_gradient,
)
from penstock.kernels.lion import lion
from penstock.kernels.moments import GROUP, SIGNED, UNSIGNED, rounding_keys
from penstock.kernels.packed_entries import PackedEntries, group_offsets, max_groups
from penstock.kernels.packed_moments import decode_packed, encode_moment_packed
from penstock.kernels.sgd import sgd_momentum
from penstock.sparsity import index_of_mask

ELEMENTS = 20_011
HYPER = {"learning_rate": 1e-3, "weight_decay": 0.1, "key": 9}
BETAS = {"beta1": 0.9, "beta2": 0.95}


def index_of(kind, seed):
    return index_of_mask(random_mask(kind, ELEMENTS, np.random.default_rng(seed)))


def eight_bit(index):
    groups = int(group_offsets(index.entry_offsets, GROUP)[-1])
    return np.zeros(index.kept, np.uint8), np.zeros(groups, np.float32)


def update(optimizer, weight, gradient, moments, step, packed, position):
    settings = {"step": step, "packed": packed, "position": position, **HYPER}
    if optimizer == "adamw":
        adamw((weight,), gradient, *moments, epsilon=1e-8, **BETAS, **settings)
    elif optimizer == "lion":
        lion((weight,), gradient, moments[0], **BETAS, **settings)
    else:
        sgd_momentum((weight,), gradient, moments[0], momentum=0.9, nesterov=False, **settings)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw by age", "lion", "sgd"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "empty"])
def test_eight_bit_updates_of_parts_have_the_bits_of_the_whole(optimizer, kind):
    index = index_of(kind, 1)
    generator = np.random.default_rng(2)
    gradients = generator.standard_normal((3, index.kept)).astype(np.float32)
    ages = generator.integers(0, 4, index.kept).astype(np.uint8)

    def run(cuts):
        weight = np.ones(index.kept, np.float32)
        moments = [eight_bit(index), eight_bit(index)]
        groups = group_offsets(index.entry_offsets, GROUP)
        for step, gradient in enumerate(gradients, 5):
            for first, last in cuts:
                part = index.cut(first, last)
                here = slice(index.entry_offsets[first], index.entry_offsets[last])
                scales = slice(groups[first], groups[last])
                packed = PackedEntries(part.entry_offsets)
                if optimizer == "adamw by age":
                    by_age = np.array([1, 2, step], np.int64)
                    packed = PackedEntries(part.entry_offsets, ages[here], by_age)
                held = [(codes[here], scale[scales]) for codes, scale in moments]
                name = optimizer.removesuffix(" by age")
                update(name, weight[here], gradient[here], held, step, packed, part.begin)
        return [weight, *moments[0], *moments[1]]

    whole = run([(0, index.granules)])
    for ours, theirs in zip(run(random_cut(ELEMENTS, generator)), whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("dtype", "split"),
    thinned([np.uint8, np.uint16, np.uint32], [False, True], others=pytest.mark.long),
)
def test_every_entry_is_corrected_by_its_own_number_of_updates(dtype, split):
    """Entries of one age get the bits of a dense update with that step."""
    generator = np.random.default_rng(3)
    kept = 5001
    index = index_of_mask(random_mask("full", kept, generator))
    by_age = np.array([1, 2, 7, 300], np.int64)
    ages = generator.integers(0, 6, kept).astype(dtype)  # beyond the last: as old as the last
    ages[:9] = np.iinfo(dtype).max
    start = generator.standard_normal((4, kept)).astype(np.float32)
    start[3] **= 2
    weight, gradient, mean, square = (array.copy() for array in start)
    parts = (weight,)
    if split:
        bits = start[0].view(np.uint32)
        parts = ((bits + 0x8000 >> 16).astype(np.uint16), bits.astype(np.uint16))
    settings = {"epsilon": 1e-8, **BETAS, **HYPER}
    packed = PackedEntries(index.entry_offsets, ages, by_age)
    adamw(parts, gradient, mean, square, step=300, packed=packed, **settings)
    if split:
        high, low = parts
        weight = ((high.astype(np.uint32) << 16) + low.astype(np.int16)).astype(np.uint32)
        weight = weight.view(np.float32)
    for age, step in enumerate(by_age.tolist()):
        chosen = np.minimum(ages, by_age.size - 1) == age
        theirs = [np.ascontiguousarray(array[chosen]) for array in start]
        adamw((theirs[0],), theirs[1], theirs[2], theirs[3], step=step, **settings)
        for ours, expected in zip((weight, mean, square), (theirs[0], *theirs[2:]), strict=True):
            np.testing.assert_array_equal(ours[chosen], expected, err_msg=f"age {age}")


def test_ages_and_offsets_are_checked():
    index = index_of("half", 1)
    arrays = [np.zeros(index.kept, np.float32) for _ in range(4)]
    settings = {"step": 1, "epsilon": 1e-8, **BETAS, **HYPER}
    for packed, message in (
        (PackedEntries(index.entry_offsets[:-1]), "entry offsets: expected"),
        (PackedEntries(index.entry_offsets, np.zeros(3, np.uint8)), "ages: expected shape"),
        (
            PackedEntries(index.entry_offsets, np.zeros(index.kept, np.uint8), np.zeros(1, int)),
            "numbers of updates by age: expected 1 or more",
        ),
        (
            PackedEntries(
                index.entry_offsets, np.zeros(index.kept, np.uint8), np.array([1, 2], np.int32)
            ),
            "numbers of updates by age: expected int64, got int32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            adamw((arrays[0],), *arrays[1:], packed=packed, **settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [False, True])
def test_squares_are_summed_per_dense_granule(kind, half):
    index = index_of(kind, 4)
    generator = np.random.default_rng(5)
    gradients = generator.standard_normal((2, index.kept)).astype(np.float32)
    slab = np.empty(index.kept, np.uint16 if half else np.float32)
    total = gradients[0]
    for take, gradient in ((copy_packed_gradient, 0), (add_packed_gradient, 1)):
        sums = take(gradients[gradient], slab, index.entry_offsets)
        values = slab if not half else (slab.astype(np.uint32) << 16).view(np.float32)
        if not half:
            np.testing.assert_array_equal(values, total)
        total = gradients[0] + gradients[1]
        squares = np.zeros(index.granules)
        np.add.at(squares, index.positions() // GRANULE, values.astype(np.float64) ** 2)
        np.testing.assert_allclose(sums, squares, rtol=1e-12)


@pytest.mark.parametrize("half", [False, True])
def test_squares_of_a_full_mask_are_those_of_a_dense_gradient(half):
    index = index_of("full", 0)
    generator = np.random.default_rng(6)
    gradients = generator.standard_normal((2, ELEMENTS)).astype(np.float32)
    slabs = [np.empty(ELEMENTS, np.uint16 if half else np.float32) for _ in range(2)]
    for gradient, packed, dense in (
        (gradients[0], copy_packed_gradient, copy_gradient),
        (gradients[1], add_packed_gradient, add_gradient),
    ):
        ours = packed(gradient, slabs[0], index.entry_offsets)
        np.testing.assert_array_equal(ours, dense(gradient, slabs[1]))
        np.testing.assert_array_equal(slabs[0], slabs[1])


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_moment_that_is_encoded_again_stays_within_a_step_of_its_code(kind, is_signed):
    index = index_of(kind, 7)
    generator = np.random.default_rng(8)
    values = generator.standard_normal(index.kept).astype(np.float32)
    values = values if is_signed else values**2
    values[generator.random(index.kept) < 0.2] = 0.0
    moment, key = eight_bit(index), rounding_keys(3, 4)[0]
    encode_moment_packed(values, moment, is_signed, index.entry_offsets, key, 0)
    found = decode_packed(moment, is_signed, index.entry_offsets)
    positions = index.positions() // GRANULE
    top = SIGNED if is_signed else UNSIGNED
    greatest = np.zeros(index.kept)
    for granule in np.unique(positions):
        entries = np.flatnonzero(positions == granule)
        for begin in range(0, entries.size, GROUP):
            group = entries[begin : begin + GROUP]
            greatest[group] = np.abs(values[group]).max()
    least = greatest / 1.875 * 2.0 ** -(top >> 3) * 1.125
    assert (np.abs(found - values) <= np.maximum(np.abs(values) / 8 * 1.001, least)).all()
    assert not found[values == 0].any()


def test_number_of_groups_is_bounded_by_the_capacity():
    generator = np.random.default_rng(9)
    for kind in KINDS:
        index = index_of_mask(random_mask(kind, ELEMENTS, generator))
        groups = int(group_offsets(index.entry_offsets, GROUP)[-1])
        assert groups <= max_groups(index.kept, ELEMENTS, GROUP, GRANULE), kind
    assert max_groups(ELEMENTS, ELEMENTS, GROUP, GRANULE) == -(-ELEMENTS // GROUP)
    assert max_groups(3, ELEMENTS, GROUP, GRANULE) == 3
