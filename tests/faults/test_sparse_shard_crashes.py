"""Sparse weights in shards on flash survive any crash, in the middle of a change of masks too."""

import functools
import random

import pytest
import torch
from crash_disk import CrashDisk
from flash_crash import crash_and_go_on
from grids import quick_first
from sharded_stores import sharded_flash
from sparse_training import train_sparse
from store_programs import make_program, random_weights, training_store

from penstock.errors import PenstockError
from penstock.io import failpoints
from penstock.sparsity import ChangeTimes, DropFraction, RigL, SparseEvolutionaryTraining
from penstock.store import AdamW, MaskRule
from penstock.store.flash import open_reader

LAYERS = (
    {"embed": (60, 16), "frozen": (9,)},
    {"0.weight": (100, 90), "0.bias": (90,)},
    {"1.weight": (95, 90), "1.small": (40, 30)},
    {"norm": (16,), "embed": (60, 16)},
)
SPARSE = {"0.weight": 4500, "1.weight": 4275, "1.small": 600}
PROGRAM = make_program(LAYERS, ("frozen",), torch.bfloat16, sparse=SPARSE)
STEPS, SEED, SHARDS = 4, 7, 2
POLICIES = {
    "set": SparseEvolutionaryTraining(ChangeTimes(1, 4, 1), DropFraction(0.3, 6)),
    "rigl": RigL(ChangeTimes(2, 4, 2), DropFraction(0.3, 6)),
}
"""Masks change at every step, or in place of every second update."""


def settings(policy):
    moments = "8bit" if policy == "rigl" else "fp32"
    rule = MaskRule(POLICIES[policy], SEED, "random", dict.fromkeys(SPARSE, 0.5))
    return {"optimizer": AdamW(0.9, 0.95, 1e-8, moments=moments), "masks": rule}


def opened(folder, policy):
    return sharded_flash(PROGRAM, folder, SHARDS, **settings(policy))


def run(store):
    """Load weights if it is new, and train to the last step, which is durable then."""
    if store.is_new:
        store.load(random_weights(PROGRAM, SEED).items())
    while store.step < STEPS:
        store.remember({"behind": store.step})
        train_sparse(store, 1)
    store.make_durable()


@functools.cache
def clean_hash(policy):
    """The hash at the end of a run in memory, without shards, that nothing interrupted."""
    store = training_store(PROGRAM, "bf16", **settings(policy))
    store.load(random_weights(PROGRAM, SEED).items())
    train_sparse(store, STEPS)
    return store.content_hash()


@functools.cache
def operations(policy, folder):
    """The number of operations on the disk of a run that never stops."""
    folder.mkdir()
    with CrashDisk(folder) as disk:
        store = opened(folder / "flash", policy)
        run(store)
        store.close()
    disk.lose()
    return len(disk.operations)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return tmp_path_factory.mktemp("clean")


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "batch"),
    [
        ("rigl", 0),
        pytest.param("set", 1, marks=pytest.mark.long),
        pytest.param("rigl", 2, marks=pytest.mark.long),
    ],
)
def test_crashes_of_all_shards_do_not_change_bits(policy, batch, clean, tmp_path):
    """Two crashes each, at any operation on the disk."""
    chosen, last = random.Random(batch), operations(policy, clean / policy)
    for number in range(4 if batch == 0 else 20):
        crash_at = chosen.randrange(1, last + 1)
        root, expected = tmp_path / str(number), (STEPS, clean_hash(policy))
        seed = batch * 1000 + number
        crash_and_go_on(root, crash_at, seed, lambda path: opened(path, policy), run, expected)


class Killed(OSError):
    """A process that ended at a fault point."""


def die_at(point, visit):
    """Return a watcher of fault points for which the visit is the last thing that happens."""
    seen, dead = [], []

    def watch(name):
        seen.extend([name] if name == point else [])
        if dead or seen.count(point) == visit:
            dead.append(name)
            raise Killed(name)

    return watch


SPARSE_PARTS = 2 * 2 + 1  # `1.small` is in one shard
PLACES = [
    f"{point}:{visit}"
    for point, visits in (
        ("flash.before_mask", (SPARSE_PARTS + 1, 2 * SPARSE_PARTS)),  # of step 1, or 2
        ("flash.before_block", (12, 31)),
        ("journal.before_seal", (5, 6)),  # before the first of two shards, or the second
        ("journal.after_seal_sync", (5, 7)),
    )
    for visit in visits
]


@pytest.mark.parametrize("policy", quick_first(POLICIES, ["rigl"]))
@pytest.mark.parametrize("place", PLACES)
def test_kill_within_a_change_of_masks_does_not_change_bits(place, policy, tmp_path):
    point, _, visit = place.partition(":")
    folder = tmp_path / "flash"
    store = opened(folder, policy)
    with failpoints.watching(die_at(point, int(visit))):
        with pytest.raises((PenstockError, OSError)):
            run(store)
        store.close()
    store = opened(folder, policy)
    assert 0 <= store.step < STEPS
    assert len({shard.step for shard in store.shards}) == 1
    run(store)
    assert store.content_hash() == clean_hash(policy)
    store.close()
    with open_reader(folder) as reader:
        reader.verify(STEPS)
        assert reader.content_hash(STEPS) == clean_hash(policy)
