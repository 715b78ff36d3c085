"""Sparse training is the training of a masked dense model, and no bit depends on how it is run."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from grids import quick_combinations, quick_first, thinned
from masked_training import Change, masked_training
from plain_training import ORDERS, ROUNDING, Recipe, distance, trainer_of
from sparse_choices import chosen, kernels, tiles
from tiny_models import language_model

STEPS = 20
EVERY = 4
END = 16
SPARSITY = 0.8
LONG = pytest.mark.long
CHANGES = {
    "two engines": {"engines": 2},
    "four engines": {"engines": 4},
    "recompute": {"engine": {"recompute": "always"}},
}


@pytest.fixture(autouse=True)
def measure_nothing():
    with chosen(kernels):
        yield


def kept(elements, density):
    return math.floor(elements * density + 0.5)


def exchange(step, masks, **options):
    """The counts of SET and RigL: a share of the kept entries, by a cosine until the end."""
    fraction = 0.3 * 0.5 * (1 + math.cos(math.pi * step / END))
    if step % EVERY or step >= END:
        return None
    counts = {}
    for name, mask in masks.items():
        present = int(mask.sum())
        count = min(int(fraction * present), mask.numel() - present)
        counts[name] = (count, count)
    return Change(counts, **options)


def pruning(step, masks):
    """The counts of gradual pruning: Zhu & Gupta, equation 1, from step 4 to step 16."""
    if step not in range(EVERY, END + 1, EVERY):
        return None
    left = (1 - (step - EVERY) / (END - EVERY)) ** 3
    sparsity = SPARSITY * (1 - left)
    counts = {}
    for name, mask in masks.items():
        drop = int(mask.sum()) - kept(mask.numel(), 1 - sparsity)
        if drop:
            counts[name] = (drop, 0)
    return Change(counts) if counts else None


def lifting(step, masks):
    """All masks are lifted at step 9."""
    if step != 9:
        return None
    return Change({name: (0, int((~mask).sum())) for name, mask in masks.items()})


EXCHANGING = {"update_every": EVERY, "update_end": END}
POLICIES = {
    "static": ({}, lambda step, masks: None),
    "set": (EXCHANGING, exchange),
    "rigl": (
        EXCHANGING,
        lambda step, masks: exchange(step, masks, by_gradient=True, replaces_update=True),
    ),
    "gmp": ({"update_every": EVERY, "schedule": {"begin": EVERY, "end": END}}, pruning),
    "densify": ({"densify_at": 9}, lifting),
}


def sparsity_of(policy, **more):
    keys, _ = POLICIES[policy]
    method = "static" if policy == "densify" else policy
    return {"method": method, "sparsity": SPARSITY, **keys, **more}


def masks_of(trainer):
    """The masks of a store, as bool tensors in the shapes of the weights."""
    store, specs = trainer.store, trainer.program.weights
    return {
        name: torch.from_numpy(store.mask(name).mask()).view(spec.shape)
        for name, spec in specs.items()
        if spec.is_sparse
    }


def run(case, recipe, folder, **changes):
    """Train and return (trainer, its steps, the masks before the first step and after each)."""
    trainer, events = trainer_of(case, recipe, folder, **changes)
    masks = [masks_of(trainer)]
    while trainer.step < recipe.steps:
        trainer.run_step()
        masks.append(masks_of(trainer))
    return trainer, events, masks


@pytest.fixture(scope="module")
def twenty_steps(tmp_path_factory):
    """Return twenty steps of a family by a policy, as `run` does."""

    @functools.cache
    def twenty_steps_of(family, policy):
        case, recipe = language_model(family), Recipe(steps=STEPS)
        folder = tmp_path_factory.mktemp("twenty")
        return run(case, recipe, folder, sparsity=sparsity_of(policy))

    return twenty_steps_of


@pytest.mark.parametrize(
    ("policy", "family"),
    quick_combinations(
        POLICIES,
        ["gpt2", "llama"],
        quick=[("rigl", "gpt2")],
    ),
)
def test_twenty_steps_agree_with_a_masked_dense_model(policy, family, twenty_steps):
    case, recipe = language_model(family), Recipe(steps=STEPS)
    trainer, events, masks = twenty_steps(family, policy)
    _, reference_policy = POLICIES[policy]
    reference = masked_training(case, recipe, masks, reference_policy)
    others = [masked_training(case, recipe, masks, reference_policy, order) for order in ORDERS]
    assert [event.loss for event in events] == pytest.approx(reference.losses, rel=2e-6)
    assert [event.step for event in events if event.changed_entries] == reference.changed
    assert (len(reference.changed) > 0) == (policy != "static")
    trainer.store.flush()
    for name, weight in reference.weights.items():
        yardstick = max(distance(other.weights[name], weight) for other in others)
        found = trainer.store.master(name)
        assert distance(found, weight) <= 4 * yardstick + ROUNDING, name
        if name in masks[-1]:
            assert not found[~masks[-1][name]].any()


@pytest.mark.parametrize("policy", quick_first(POLICIES, ["rigl", "gmp"]))
def test_steps_report_sparsity_changes_and_arithmetic(policy, twenty_steps, tmp_path):
    case, recipe = language_model("gpt2"), Recipe(steps=STEPS)
    _, events, masks = twenty_steps("gpt2", policy)
    dense, _ = trainer_of(case, recipe, tmp_path / "dense")
    dense_flops = dense.run_step().flops
    elements = sum(mask.numel() for mask in masks[0].values())
    tokens = recipe.size * 16
    for event, before, after in zip(events, masks, masks[1:], strict=False):
        present = sum(int(mask.sum()) for mask in after.values())
        assert event.sparsity == pytest.approx(1 - present / elements)
        changed = sum(int((before[name] ^ mask).sum()) for name, mask in after.items())
        assert event.changed_entries == changed
        absent = elements - sum(int(mask.sum()) for mask in before.values())
        computed_densely = 1 if policy == "rigl" and changed else 0
        assert event.flops == dense_flops - (3 - computed_densely) * 2 * tokens * absent


def bits(folder, policy="rigl", precision="fp32", until=None, seed=0, **changes):
    """The losses of a run and the hash of its weights."""
    recipe = Recipe(seed=seed, steps=10, warmup_steps=2)
    keys = {"rigl": {"update_every": 3, "update_end": 9}, "set": {"update_every": 3}}
    keys["gmp"] = {"update_every": 3, "schedule": {"begin": 2, "end": 9}}
    sparsity = {"method": policy, "sparsity": SPARSITY, **keys[policy]}
    trainer, events = trainer_of(
        language_model("gpt2"), recipe, folder, until,
        sparsity=sparsity, precision=precision, **changes,
    )  # fmt: skip
    trainer.train()
    losses, weights = [event.loss for event in events], trainer.store.content_hash()
    trainer.close()
    return losses, weights


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the bits of a run in memory, on one engine, without a stop."""

    @functools.cache
    def undisturbed_bits(policy, precision):
        return bits(tmp_path_factory.mktemp("undisturbed"), policy, precision)

    return undisturbed_bits


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "precision", "changes"),
    thinned(["rigl", "set", "gmp"], ["fp32", "bf16"], list(CHANGES), others=LONG),
)
def test_engines_and_recomputation_change_no_bit(policy, precision, changes, undisturbed, tmp_path):
    found = bits(tmp_path / "run", policy, precision, **CHANGES[changes])
    assert found == undisturbed(policy, precision)


@pytest.mark.parametrize(
    ("policy", "precision"), thinned(["rigl", "set", "gmp"], ["fp32", "bf16"], others=LONG)
)
def test_a_stopped_run_continues_with_the_same_bits(policy, precision, undisturbed, tmp_path):
    losses, weights = undisturbed(policy, precision)
    went_on = []
    for until in (2, 3, 4, 6, None):  # before, at and after the change of step 3, and at another
        part, last = bits(tmp_path / "parts", policy, precision, until)
        went_on += part
    assert went_on == losses
    assert last == weights


@pytest.mark.parametrize(
    ("policy", "precision"), thinned(["gmp", "rigl", "set"], ["fp32", "bf16"], others=LONG)
)
def test_a_store_on_flash_has_the_bits_of_one_in_memory_wherever_it_stops(
    policy, precision, undisturbed, tmp_path
):
    losses, weights = undisturbed(policy, precision)
    on_flash = {"store": {"flash": {"path": str(tmp_path / "flash")}}}
    went_on = []
    for until in (2, 3, 4, 6, None):  # before, at and after the change of step 3, and at another
        part, last = bits(tmp_path / "run", policy, precision, until, **on_flash)
        went_on += part
    assert went_on == losses
    assert last == weights


def test_expanded_tiles_agree_with_kernels(undisturbed, tmp_path):
    losses, _ = undisturbed("rigl", "fp32")
    with chosen(tiles):
        expanded, _ = bits(tmp_path / "tiles")
    assert expanded == pytest.approx(losses, rel=1e-4)
    assert expanded != losses  # or the choice had no effect


def test_a_resumed_run_takes_the_recorded_choice(undisturbed, tmp_path):
    losses, weights = undisturbed("rigl", "fp32")
    begun, _ = bits(tmp_path / "parts", until=4)
    with chosen(tiles):  # as a measurement on a busy machine might have chosen
        rest, last = bits(tmp_path / "parts")
    assert begun + rest == losses
    assert last == weights


@pytest.mark.parametrize("initial", ["random", "balanced", "magnitude"])
def test_initial_masks(initial, tmp_path):
    case, recipe = language_model("gpt2"), Recipe(steps=1, warmup_steps=0)
    sparsity = sparsity_of("static", initial_mask=initial)
    trainer, _ = trainer_of(case, recipe, tmp_path, sparsity=sparsity)
    start = dict(case.plain(recipe.seed).named_parameters())
    for name, mask in masks_of(trainer).items():
        count = kept(mask.numel(), 1 - SPARSITY)
        assert int(mask.sum()) == count
        assert torch.equal(trainer.store.master(name), start[name] * mask)
        if initial == "balanced":
            per_row = mask.sum(1)
            assert int(per_row.max() - per_row.min()) <= 1
        if initial == "magnitude":
            least = start[name].abs().flatten().sort(descending=True).values[count - 1]
            assert torch.equal(mask, start[name].abs() >= least)


def test_another_seed_has_other_masks(tmp_path):
    case = language_model("gpt2")
    found = [
        masks_of(
            trainer_of(case, Recipe(seed=s), tmp_path / str(s), sparsity=sparsity_of("set"))[0]
        )
        for s in (0, 1)
    ]
    assert all(not torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.long
def test_memory_of_the_store_is_that_of_the_entries(tmp_path):
    case, recipe = language_model("gpt2", n_embd=128), Recipe(steps=STEPS)
    dense, _ = trainer_of(case, recipe, tmp_path / "dense")
    sparse, _ = trainer_of(case, recipe, tmp_path / "sparse", sparsity=sparsity_of("rigl"))
    specs = sparse.program.weights.values()
    absent = sum(spec.elements - spec.capacity for spec in specs if spec.is_sparse)
    entries = sum(spec.capacity for spec in specs if spec.is_sparse)
    before, after = dense.store.memory_bytes, sparse.store.memory_bytes
    for use in before:  # masters, gradients and two moments: 4 bytes each
        assert before[use] - after[use] == pytest.approx(4 * absent, abs=1 << 12), use
    assert after["age"] <= entries + (1 << 12)
    assert after["index"] <= 1.1 * entries + max(s.index_bytes for s in specs) + (1 << 12)
    assert np.isfinite(sparse.run_step().loss)
