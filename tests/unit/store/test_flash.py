"""The store on flash does what the store in memory does, to the bit, with little memory."""

import itertools
import math
import random
import threading
import time

import numpy as np
import pytest
import torch
from grids import thinned
from process_files import open_files
from store_programs import (
    LAYERS,
    SMALL_BLOCK,
    forward_sweep,
    least_flash_bytes,
    make_program,
    random_gradients,
    random_weights,
    send,
    train,
    training_store,
)

from penstock.errors import BudgetError, CorruptionError, StorageError
from penstock.io import durable
from penstock.store import SGD, AdamW, DramStore, Lion
from penstock.store.flash import least_dram_bytes, store as store_module
from penstock.store.flash.layout import BLOCK_ELEMENTS


def same(flash_store, dram_store):
    assert flash_store.step == dram_store.step
    for name in dram_store.program.weights:
        ours, theirs = flash_store.master(name), dram_store.master(name)
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), name
        if not dram_store.program.weights[name].trainable:
            continue
        for role, value in dram_store.state(name).items():
            assert torch.equal(flash_store.state(name)[role], value), (name, role)
    assert flash_store.content_hash() == dram_store.content_hash()


OPTIMIZERS = (
    AdamW(0.9, 0.95, 1e-8),
    AdamW(0.9, 0.95, 1e-8, moments="8bit"),
    SGD(0.9),
    SGD(0.9, moments="8bit"),
    SGD(),
    Lion(),
    Lion(moments="8bit"),
)


@pytest.mark.parametrize(
    ("kind", "seed"), thinned([*itertools.product(["fp32", "bf16"], OPTIMIZERS)], range(3))
)
@pytest.mark.usefixtures("speculated")
def test_flash_store_equals_store_in_memory(flash, kind, seed):
    precision, optimizer = kind
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    program = make_program(LAYERS, frozen=("position",), stream_dtype=dtype)
    ours = flash(program, optimizer=optimizer, clip_norm=1.0)
    theirs = training_store(program, precision, optimizer=optimizer, clip_norm=1.0)
    for store in (ours, theirs):
        store.load(random_weights(program, seed).items())
    assert train(ours, 6, seed) == train(theirs, 6, seed)
    for name, view in forward_sweep(theirs).items():
        assert torch.equal(forward_sweep(ours)[name], view)
    assert ours.unchanged() == theirs.unchanged() == ()
    same(ours, theirs)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("speculated")
def test_stage_with_only_empty_trainable_weights(flash, precision):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    layers = ({"a": (50, 16)}, {"empty": (0, 3), "frozen": (40,)}, {"b": (16,)})
    program = make_program(layers, frozen=("frozen",), stream_dtype=dtype)
    ours, theirs = flash(program), training_store(program, precision)
    for store in (ours, theirs):
        store.load(random_weights(program, 0).items())
    assert train(ours, 3, 0) == train(theirs, 3, 0)
    same(ours, theirs)


DEEP = [{f"{i}.weight": (90, 70), f"{i}.bias": (70,)} for i in range(9)]


STAGE = 32_768  # the weights of a stage, padded; its gradients take as much
LEAST = (
    4 * SMALL_BLOCK * (8 + 4) + 2 * STAGE + 2 * STAGE
)  # four blocks, two slabs, two stages of weights


@pytest.mark.parametrize(
    ("dram", "optimizer"),
    thinned(
        [LEAST, LEAST + 3 * STAGE, LEAST + 9 * STAGE, 700_000, 2_000_000],
        [AdamW(0.9, 0.95, 1e-8, moments="8bit"), AdamW(0.9, 0.95, 1e-8), SGD()],
        others=pytest.mark.long,
    ),
)
@pytest.mark.usefixtures("speculated")
def test_any_memory_budget_gives_the_same_bits(flash, dram, optimizer):
    program = make_program(DEEP)
    ours = flash(program, dram=dram, optimizer=optimizer, clip_norm=1.0)
    theirs = training_store(program, optimizer=optimizer, clip_norm=1.0)
    for store in (ours, theirs):
        store.load(random_weights(program, 1).items())
    backward_too(ours, 1, 4)
    backward_too(theirs, 1, 4)
    same(ours, theirs)
    assert sum(ours.memory_bytes.values()) <= dram


def test_excess_memory_budget_is_not_allocated(flash):
    program = make_program(DEEP)
    ours, theirs = flash(program, dram=1 << 40).memory_bytes, training_store(program).memory_bytes
    padded = 9 * STAGE  # each stage to whole pages
    assert theirs["master"] <= ours["weights"] == padded
    assert theirs["exp_avg"] + theirs["exp_avg_sq"] <= ours["state"] == 2 * padded
    assert ours["blocks"] <= 2 * padded


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    thinned([AdamW(0.9, 0.95, 1e-8, moments="8bit"), AdamW(0.9, 0.95, 1e-8)], ["fp32", "bf16"]),
)
@pytest.mark.usefixtures("speculated")
def test_store_smaller_than_four_blocks_needs_its_own_size(flash, optimizer, precision):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    program = make_program([*LAYERS, {"large": (200, 200)}], ("position",), stream_dtype=dtype)
    least = least_dram_bytes(program, optimizer, half_gradients=False)
    usual = {"optimizer": optimizer, "clip_norm": 1.0}
    ours = flash(program, dram=least, block_elements=BLOCK_ELEMENTS, **usual)
    assert ours.memory_bytes["blocks"] == 0
    assert sum(ours.memory_bytes.values()) == least
    theirs = training_store(program, precision, **usual)
    for store in (ours, theirs):
        store.load(random_weights(program, 1).items())
    backward_too(ours, 1, 4)
    backward_too(theirs, 1, 4)
    same(ours, theirs)


@pytest.mark.parametrize("dram", [LEAST, 2_000_000])
@pytest.mark.usefixtures("speculated")
def test_only_every_third_step_is_durable(flash, dram):
    program = make_program(DEEP)
    ours = flash(program, dram=dram, durable_every=3)
    theirs = training_store(program)
    for store in (ours, theirs):
        store.load(random_weights(program, 1).items())
    durable = []
    for _ in range(7):
        backward_too(ours, 1, 1, durable=False)
        ours.flush()
        ours._pipeline.drain()
        durable.append(ours.durable_step)
    assert durable == [0, 0, 0, 3, 3, 3, 6]  # sealed when the next gradients come
    ours.close()
    again = flash(program, dram=dram, durable_every=3)
    assert again.step == 6
    backward_too(again, 1, 2, durable=False)
    assert again.durable_step == 6
    again.make_durable()
    assert again.durable_step == 8
    again.close()
    backward_too(theirs, 1, 8)
    same(flash(program, dram=dram), theirs)


def test_state_in_memory_is_written_for_durable_steps_only(flash):
    program = make_program(DEEP)
    store = flash(program, dram=2_000_000, durable_every=4)
    store.load(random_weights(program, 1).items())
    backward_too(store, 1, 4)
    store.take_flash_traffic()
    written = []
    for _ in range(4):
        backward_too(store, 1, 1, durable=False)
        store.flush()
        store._pipeline.drain()
        written.append(store.take_flash_traffic().written_bytes)
    assert written == [0, 0, 0, 9 * 8192 * 12]


def test_a_flipped_bit_in_a_gradient_on_flash_is_named(flash, monkeypatch):
    program = make_program(DEEP)
    store = flash(program, dram=LEAST)
    store.load(random_weights(program, 1).items())
    checksums = store._spill._checks
    backward_too(store, 1, 1)
    forward_sweep(store)
    for stage, gradients in random_gradients(program, np.random.default_rng(0)).items():
        send(store, {stage: gradients})
    store._pipeline.drain()
    data = np.zeros(4096, np.uint8)
    store._spill._file.read(0, (page := aligned(data)))
    page[17] ^= 4
    store._spill._file.write(0, page)
    assert checksums
    store.commit()
    with pytest.raises(CorruptionError, match=r"gradients: damaged in bytes .*checksum"):
        store.flush()


def aligned(data):
    from penstock.kernels.memory import allocate

    page = allocate(data.nbytes)
    page[:] = data
    return page


def backward_too(store, seed, steps, durable=True):
    """Steps whose backward sweep fetches again, as a real one does."""
    for _ in range(steps):
        forward_sweep(store)
        gradients = random_gradients(store.program, np.random.default_rng([seed, store.step]))
        for stage in reversed(store.program.stages):
            if stage is not store.program.stages[-1]:
                store.fetch(stage.index)
            send(store, {stage.index: gradients[stage.index]})
        store.commit()
    if durable:
        store.flush() if isinstance(store, DramStore) else store.make_durable()


def test_state_is_read_and_written_once_and_weights_read_twice(flash):
    program = make_program(DEEP)
    elements = 9 * 8192  # a stage's 6370 weights, padded
    store = flash(program, dram=LEAST)
    store.load(random_weights(program, 1).items())
    backward_too(store, 1, 1)
    store.take_flash_traffic()
    backward_too(store, 1, 3)
    traffic = store.take_flash_traffic()
    # Gradients go out and come back once.
    assert traffic.written_bytes == 3 * elements * (12 + 4)
    # At the turns what is in memory is not read again. The last updates run without a sweep, after
    # which the weights are read once more: seven times in three steps.
    assert elements * (3 * 12 + 7 * 4) >= traffic.read_bytes >= 3 * elements * (16 + 2.5)


@pytest.mark.parametrize(("dram", "state"), [(700_000, (5.0, 8.0)), (2_000_000, (0.0, 0.0))])
def test_state_that_fits_in_memory_is_not_read_again(flash, dram, state):
    program = make_program(DEEP)
    store = flash(program, dram=dram)
    store.load(random_weights(program, 1).items())
    backward_too(store, 1, 2)
    store.take_flash_traffic()
    backward_too(store, 1, 2)
    traffic = store.take_flash_traffic()
    least, most = (2 * 9 * 8192 * share for share in state)  # of state alone
    assert least <= traffic.read_bytes <= most
    assert traffic.written_bytes == 2 * 9 * 8192 * 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("speculated")
def test_reopened_store_continues_to_the_same_bits(flash, dtype):
    program = make_program(LAYERS, stream_dtype=dtype)
    precision = "fp32" if dtype == torch.float32 else "bf16"
    theirs = training_store(program, precision)
    ours = flash(program)
    assert ours.is_new
    for store in (ours, theirs):
        store.load(random_weights(program, 2).items())
    assert ours.durable_step == 0
    train(ours, 3, 5)
    ours.remember({"note": "three"})
    ours.make_durable()
    assert ours.durable_step == 3
    train(ours, 2, 5)  # the last of them will not be durable
    ours.close()
    again = flash(program)
    assert not again.is_new
    assert again.step in (3, 4)
    assert again.extra == {"note": "three"}
    train(again, 6 - again.step, 5)
    train(theirs, 6, 5)
    same(again, theirs)


@pytest.mark.usefixtures("speculated")
def test_step_is_durable_less_than_one_step_after_commit(flash):
    program = make_program(LAYERS)
    store = flash(program)
    store.load(random_weights(program, 2).items())
    for step in range(4):
        forward_sweep(store)
        send(store, random_gradients(program, np.random.default_rng(step)))
        store.flush()
        store._pipeline.drain()
        assert store.durable_step == step  # before step + 1 is committed
        store.commit()


@pytest.mark.usefixtures("speculated")
def test_a_disk_slower_than_a_step_does_not_fall_behind(flash, monkeypatch):
    def slow_sync(descriptor, real=durable.sync):
        time.sleep(0.02)
        real(descriptor)

    monkeypatch.setattr(durable, "sync", slow_sync)
    store = flash(make_program(LAYERS))
    store.load(random_weights(store.program, 2).items())
    for step in range(1, 5):
        train(store, 1, 5)
        assert store.durable_step >= step - 1


def test_second_process_is_refused(flash):
    program = make_program(LAYERS)
    flash(program)
    with pytest.raises(StorageError, match=r"is in use by process \d+; wait"):
        flash(program)


@pytest.mark.parametrize("what", ["GradientSpill", "StateBlocks", "Pipeline"])
@pytest.mark.parametrize("is_new", [True, False])
def test_failed_open_leaves_no_file_open(flash, tmp_path, monkeypatch, what, is_new):
    def refused(*_, **__):
        raise StorageError("no room")

    program = make_program(DEEP)
    if not is_new:
        flash(program, dram=LEAST).close()
    before = open_files(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(store_module, what, refused)
        with pytest.raises(StorageError, match="no room"):
            flash(program, dram=LEAST)
    assert open_files(tmp_path) == before
    flash(program, dram=LEAST)


@pytest.mark.usefixtures("speculated")
def test_interrupt_before_a_slab_is_filled_loses_no_slab(flash, monkeypatch):
    program = make_program(DEEP)
    store = flash(program, dram=LEAST)
    store.load(random_weights(program, 1).items())
    forward_sweep(store)
    gradients = random_gradients(program, np.random.default_rng(0))
    for _ in range(3):  # more often than there are slabs
        with monkeypatch.context() as patched:
            patched.setattr(store._gradients, "place", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.receive(8, gradients[8])
        store.discard()
    send(store, gradients)
    store.commit()
    store.flush()


def test_unit_waits_for_its_last_pending_gradient(flash, monkeypatch):
    """A step that was interrupted and is replayed gives a unit two."""
    store = flash(make_program(DEEP), dram=LEAST)
    store.load(random_weights(store.program, 1).items())
    may_go_on, written = threading.Event(), []

    def slow_write(unit, blocks, slab):
        if written:
            may_go_on.wait(60)
        written.append(unit)
        return slab.nbytes

    monkeypatch.setattr(store._spill, "write", slow_write)
    pipeline, unit = store._pipeline, store._layout.units[-1]
    pipeline.spill(unit, pipeline.slab())
    pipeline.spill(unit, pipeline.slab())
    try:
        pipeline.slab()  # the first comes back
        with pipeline._changed:
            assert pipeline._next_of_pass(unit, unit.blocks[0]) is None
    finally:
        may_go_on.set()
    pipeline.drain()
    with pipeline._changed:
        assert pipeline._next_of_pass(unit, unit.blocks[0]) is not None


def interrupted(*_):
    raise KeyboardInterrupt


def test_the_size_of_the_extents_is_durable_before_the_journal(flash, monkeypatch):
    done = []

    def noted(name, real):
        def call(*arguments):
            done.append(name)
            return real(*arguments)

        return call

    monkeypatch.setattr(durable, "sync_data", noted("extents", durable.sync_data))
    monkeypatch.setattr(durable, "replace_file", noted("journal", durable.replace_file))
    flash(make_program(LAYERS))
    assert done == ["extents", "journal"]


def test_every_flipped_bit_on_flash_is_named(flash, tmp_path):
    program = make_program(LAYERS, stream_dtype=torch.bfloat16)
    store = flash(program)
    store.load(random_weights(program, 2).items())
    train(store, 2, 5)
    store.make_durable()
    store.close()
    chosen = random.Random(0)
    extents, journal = tmp_path / "flash" / "extents", tmp_path / "flash" / "journal"
    held = {unit: store._version._place[unit.index] for unit in store._layout.units}
    for _ in range(150):
        unit = chosen.choice(list(held))
        begin = unit.offset + held[unit] * unit.place_bytes
        byte = chosen.randrange(begin, begin + unit.place_bytes)
        with flipped(extents, byte, chosen.randrange(8)):
            again = flash(program)
            with pytest.raises(CorruptionError, match=r"extents: damaged in bytes .*checksum"):
                read_all(again)
            again.close()
    for _ in range(300):
        byte = chosen.randrange(journal.stat().st_size)
        with (
            flipped(journal, byte, chosen.randrange(8)),
            pytest.raises(CorruptionError, match=r"journal: .*checksum"),
        ):
            flash(program)
    read_all(flash(program))


class flipped:
    def __init__(self, path, byte, bit):
        self.path, self.byte, self.mask = path, byte, 1 << bit

    def __enter__(self):
        with self.path.open("r+b") as file:
            file.seek(self.byte)
            value = file.read(1)[0]
            file.seek(self.byte)
            file.write(bytes([value ^ self.mask]))

    def __exit__(self, *_):
        self.__enter__()


def read_all(store):
    for name in store.program.weights:
        for role, stored in store.roles(name).items():
            store.read(name, role, 0, math.prod(stored.shape))


UNEQUAL = ({"embed": (64, 512)}, {"middle": (2048,)}, {"head": (64, 512)})
"""The first and the last stage are much larger than the one between, which follows and precedes
them: the least memory does not suffice for both."""


@pytest.mark.parametrize("release", ["flush", "discard"])
def test_sweep_may_begin_anew_after_the_last_stage_with_the_least_memory(flash, release):
    """As of an evaluation, whose micro-batches go forward only, and of a step that is repeated."""
    program = make_program(UNEQUAL)
    store = flash(program, dram=least_flash_bytes(program))
    store.load(random_weights(program, 1).items())
    train(store, 1, seed=1)
    first = forward_sweep(store)
    with pytest.raises(BudgetError, match="are needed at once"):  # the last stage's are in use
        store.fetch(0)
    getattr(store, release)()
    again = forward_sweep(store)
    assert all(torch.equal(first[name], again[name]) for name in program.weights)
