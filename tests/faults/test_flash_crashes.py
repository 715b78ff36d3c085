"""A store on flash survives any crash: it opens at the last durable step, to the same bits."""

import functools
import random

import pytest
import torch
from crash_disk import CrashDisk
from flash_crash import crash_and_go_on
from grids import quick_first
from sparse_training import train_sparse
from speculated import MODES
from store_programs import (
    flash_store,
    least_flash_bytes,
    make_program,
    random_weights,
    train,
    training_store,
)

from penstock.sparsity import ChangeTimes, DropFraction, RigL, SparseEvolutionaryTraining
from penstock.store import AdamW, MaskRule
from penstock.store.flash.guesses import ENVIRONMENT_VARIABLE

LAYERS = (
    {"embed": (50, 16), "frozen": (9,)},
    *({f"{i}.weight": (70, 70), f"{i}.bias": (70,)} for i in range(4)),
    {"norm": (16,), "embed": (50, 16)},
)
PROGRAM = make_program(LAYERS, frozen=("frozen",), stream_dtype=torch.bfloat16)
CAPACITIES = {f"{i}.weight": 2450 for i in range(4)}
SPARSE_PROGRAM = make_program(
    LAYERS, frozen=("frozen",), stream_dtype=torch.bfloat16, sparse=CAPACITIES
)
STEPS = 4
SEED = 7
DRAM = 215_000
ADAMW = AdamW(0.9, 0.95, 1e-8)
ADAMW_8BIT = AdamW(0.9, 0.95, 1e-8, moments="8bit")
DENSE = ("fp32", "8bit")
OPTIMIZERS = {"fp32": ADAMW, "8bit": ADAMW_8BIT, "sparse": ADAMW, "sparse-8bit": ADAMW_8BIT}
POLICIES = {
    "sparse": SparseEvolutionaryTraining(ChangeTimes(1, 4, 1), DropFraction(0.3, 6)),
    "sparse-8bit": RigL(ChangeTimes(2, 4, 2), DropFraction(0.3, 6)),
}
MASKS = {
    kind: MaskRule(policy, SEED, "random", dict.fromkeys(CAPACITIES, 0.5))
    for kind, policy in POLICIES.items()
}
"""The masks of kinds with sparse weights, which change at every step, or instead of every second
update."""


def settings(moments):
    """Program, and settings of a store, of a kind."""
    program = SPARSE_PROGRAM if moments in MASKS else PROGRAM
    return program, {"optimizer": OPTIMIZERS[moments], "masks": MASKS.get(moments)}


@functools.cache
def memory(moments):
    """The memory of a store: a part of the gradients does not fit. Updates before the commit need
    more than the minimum."""
    program, options = settings(moments)
    return least_flash_bytes(program, **options) if moments in MASKS else DRAM


def opened(folder, moments="fp32"):
    program, options = settings(moments)
    return flash_store(program, folder, dram_bytes=memory(moments), **options)


def in_memory(moments="fp32"):
    program, options = settings(moments)
    return training_store(program, "bf16", **options)


def go(store, steps, seed):
    """Train; with sparse weights on the same gradients whatever the seed."""
    if store.mask_sizes:
        train_sparse(store, steps)
    else:
        train(store, steps, seed)


def run(store, seed=SEED):
    """Load weights if it is new, and train to the last step."""
    if store.is_new:
        store.load(random_weights(store.program, seed).items())
    store.remember({"note": "many sectors " * 300})
    go(store, STEPS - store.step, seed)
    store.make_durable()


@functools.cache
def clean_hash(moments, seed=SEED):
    """The hash at the end of a run in memory that nothing interrupted."""
    store = in_memory(moments)
    store.load(random_weights(store.program, seed).items())
    go(store, STEPS, seed)
    return store.content_hash()


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    """What a run that never stopped does to the disk, by kind and by how it speculates."""

    @functools.cache
    def found(moments, mode):
        with CrashDisk(tmp_path_factory.mktemp("clean")) as disk:
            store = opened(disk.root / "flash", moments)
            run(store)
            assert store.flash_bytes > (disk.root / "flash" / "extents").stat().st_size
            speculated(store, moments, mode)
            store.close()
        disk.lose()
        return disk.operations

    return found


def speculated(store, moments, mode):
    """Check that the run has speculated, with the result that the mode forces."""
    traffic = store.take_flash_traffic()
    assert (traffic.speculated_bytes > 0) == (mode in ("on", "mixed:4") and moments in DENSE)
    assert (traffic.discarded_bytes > 0) == (mode in ("wrong", "mixed:4") and moments in DENSE)


@pytest.mark.parametrize("moments", quick_first(OPTIMIZERS, ["8bit"]))
@pytest.mark.long
@pytest.mark.parametrize("batch", range(5))
def test_crashes_do_not_change_bits(batch, moments, operations, tmp_path, monkeypatch):
    """Two crashes each, with a part of the gradients on flash."""
    crash_ten_times(batch, moments, "off", operations, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("moments", DENSE)
@pytest.mark.parametrize(
    "batch", [0, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (1, 2))]
)
def test_crashes_amid_speculation_do_not_change_bits(
    batch, moments, mode, operations, tmp_path, monkeypatch
):
    crash_ten_times(100 + batch, moments, mode, operations, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("moments", OPTIMIZERS)
@pytest.mark.parametrize("batch", range(250))
def test_ten_thousand_crashes_do_not_change_bits(batch, moments, operations, tmp_path, monkeypatch):
    crash_ten_times(1000 + batch, moments, "off", operations, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("moments", DENSE)
@pytest.mark.parametrize("batch", range(35))
def test_two_thousand_crashes_amid_speculation_do_not_change_bits(
    batch, moments, mode, operations, tmp_path, monkeypatch
):
    crash_ten_times(1000 + batch, moments, mode, operations, tmp_path, monkeypatch)


def crash_ten_times(batch, moments, mode, operations, tmp_path, monkeypatch):
    """Crash ten runs, twice each, that speculate as the mode says."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, mode)
    chosen = random.Random(batch)
    for number in range(10):
        seed = batch * 1000 + number
        crash_at = chosen.randrange(1, len(operations(moments, mode)) + 1)
        crash_and_go_on(
            tmp_path / str(number),
            crash_at,
            seed,
            lambda path: opened(path, moments),
            run,
            (STEPS, clean_hash(moments)),
        )
