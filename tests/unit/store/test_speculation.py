"""Updates before the commit change no bit, whether the commit decides as expected or not."""

import itertools
import random
import threading
import time

import numpy as np
import pytest
import torch
from grids import pairwise
from speculated import MODES
from store_programs import (
    LAYERS,
    forward_sweep,
    make_program,
    random_gradients,
    random_weights,
    send,
    training_store,
)

from penstock.errors import ConfigError, NonFiniteError
from penstock.store import SGD, AdamW, GroupSettings
from penstock.store.flash import medium
from penstock.store.flash.guesses import (
    ENVIRONMENT_VARIABLE,
    ForcedGuesses,
    Guess,
    forced_guesses,
)

DEEP = [{f"{i}.weight": (90, 70), f"{i}.bias": (70,)} for i in range(9)]
STAGE = 32_768  # bytes of a stage's weights in float32, and of its gradients
LITTLE, AMPLE = 500_000, 2_000_000  # some gradients on flash; all state in memory
SPECULATING = MODES[1:]


def backward_too(store, steps, seed=1, scale=1.0):
    """Steps whose backward sweep fetches every stage again, as a real one does."""
    commits = []
    for _ in range(steps):
        forward_sweep(store)
        generator = np.random.default_rng([seed, store.step])
        gradients = random_gradients(store.program, generator, scale)
        for stage in reversed(store.program.stages):
            if stage is not store.program.stages[-1]:
                store.fetch(stage.index)
            send(store, {stage.index: gradients[stage.index]})
        commits.append(store.commit())
    return commits


def pair(flash, monkeypatch, mode, program=None, seed=1, **settings):
    """Return a store on flash that speculates as the mode says, and one in memory."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, mode)
    program = make_program(DEEP) if program is None else program
    ours = flash(program, **settings)
    common = {key: settings[key] for key in ("clip_norm", "optimizer") if key in settings}
    half = any(spec.stream_dtype == torch.bfloat16 for spec in program.weights.values())
    theirs = training_store(program, "bf16" if half else "fp32", **common)
    for store in (ours, theirs):
        store.load(random_weights(program, seed).items())
    return ours, theirs


def same(ours, theirs):
    """Check that two stores have the same weights and state."""
    theirs.flush()
    assert ours.step == theirs.step
    assert ours.content_hash() == theirs.content_hash()
    for name, spec in theirs.program.weights.items():
        if spec.trainable:
            for role, value in theirs.state(name).items():
                assert torch.equal(ours.state(name)[role], value), (name, role)


@pytest.mark.parametrize(
    ("mode", "dram", "optimizer"),
    pairwise(
        SPECULATING,
        [LITTLE, 700_000, AMPLE],
        [AdamW(0.9, 0.95, 1e-8), AdamW(0.9, 0.95, 1e-8, moments="8bit"), SGD()],
    ),
)
def test_bits_are_those_of_the_store_in_memory(flash, monkeypatch, mode, dram, optimizer):
    ours, theirs = pair(flash, monkeypatch, mode, dram=dram, optimizer=optimizer, clip_norm=1e9)
    assert backward_too(ours, 5) == backward_too(theirs, 5)
    traffic = ours.take_flash_traffic()
    assert (traffic.speculated_bytes > 0) == (mode != "wrong")
    assert (traffic.discarded_bytes > 0) == (mode != "on")
    assert ours.unchanged() == theirs.unchanged() == ()
    same(ours, theirs)


@pytest.mark.parametrize("mode", SPECULATING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_frozen_and_small_weights(flash, monkeypatch, mode, dtype):
    program = make_program(LAYERS, frozen=("position",), stream_dtype=dtype)
    ours, theirs = pair(flash, monkeypatch, mode, program)
    assert backward_too(ours, 5) == backward_too(theirs, 5)
    same(ours, theirs)
    assert sum(traffic_of(ours)) > 0


def traffic_of(store):
    traffic = store.take_flash_traffic()
    return traffic.speculated_bytes, traffic.discarded_bytes


@pytest.mark.parametrize("mode", SPECULATING)
@pytest.mark.parametrize("dram", [LITTLE, AMPLE])
def test_only_every_third_step_is_durable(flash, monkeypatch, mode, dram):
    """Only the step after a durable one has places of its own to write to."""
    ours, theirs = pair(flash, monkeypatch, mode, dram=dram, durable_every=3)
    assert backward_too(ours, 7) == backward_too(theirs, 7)
    same(ours, theirs)


def test_complete_speculation_leaves_little_to_write_after_the_commit(flash, monkeypatch):
    ours, _ = pair(flash, monkeypatch, "on", dram=AMPLE)
    backward_too(ours, 2)
    ours.make_durable()
    ours.take_flash_traffic()
    backward_too(ours, 1)
    ours._pipeline.drain()
    traffic = ours.take_flash_traffic()
    assert traffic.speculated_bytes == traffic.written_bytes == 9 * 8192 * 12


def test_certain_clipping_ends_speculation(flash, monkeypatch):
    """The norm of the gradients so far is a lower bound: after the first stage it is too large."""
    ours, theirs = pair(flash, monkeypatch, "on", dram=AMPLE, clip_norm=0.5)
    assert backward_too(ours, 3) == backward_too(theirs, 3)
    assert traffic_of(ours) == (0, 0)
    same(ours, theirs)


def test_clipping_that_the_last_stage_decides(flash, monkeypatch):
    """Nearly all units are updated in vain, by the factor 1."""
    ours, theirs = pair(flash, monkeypatch, "on", dram=AMPLE, clip_norm=1e9)
    norm = backward_too(theirs, 1)[0].decision.norm
    monkeypatch.undo()
    ours, theirs = pair(flash, monkeypatch, "on", folder="b", dram=AMPLE, clip_norm=0.97 * norm)
    assert backward_too(ours, 1) == backward_too(theirs, 1)
    speculated, discarded = traffic_of(ours)
    assert speculated == 0
    assert discarded > 5 * 8192 * 12
    assert backward_too(ours, 2, scale=0.1) == backward_too(theirs, 2, scale=0.1)
    assert traffic_of(ours)[0] > 0
    same(ours, theirs)


def test_least_memory_is_left_to_the_sweep(flash, monkeypatch):
    least = 4 * 2048 * (8 + 4) + 4 * STAGE
    ours, theirs = pair(flash, monkeypatch, "on", dram=least)
    assert backward_too(ours, 3) == backward_too(theirs, 3)
    assert traffic_of(ours) == (0, 0)
    same(ours, theirs)


class Fixed(ForcedGuesses):
    """Guesses the same of every step."""

    def __init__(self, clip_scale, waits=False):
        self.guess = Guess(clip_scale, waits=waits)

    def of(self, step):
        return self.guess


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("clip_scale", [1.0, 0.5])
def test_backward_reads_never_wait_for_ever(flash, monkeypatch, stages, clip_scale):
    least = 4 * 2048 * (8 + 4) + 4 * STAGE
    ours, theirs = pair(flash, monkeypatch, "off", dram=least + stages * STAGE)
    ours._speculator._guesses = Fixed(clip_scale)
    assert backward_too(ours, 12) == backward_too(theirs, 12)
    same(ours, theirs)


def speculating(flash, monkeypatch, clip_scale, dram):
    """Return stores of which the first has updated all units but the last by a guess, and the
    gradients of stage 0."""
    ours, theirs = pair(flash, monkeypatch, "off", dram=dram)
    ours._speculator._guesses = Fixed(clip_scale)
    for store in (ours, theirs):
        backward_too(store, 2)
        forward_sweep(store)
    gradients = random_gradients(ours.program, np.random.default_rng(3))
    for store, stage in itertools.product((ours, theirs), range(8, 0, -1)):
        store.receive(stage, gradients[stage])
        store.fetch(stage - 1)
    ours._pipeline.wait_for_speculation()
    assert ours._pipeline._speculation.branch.updated
    return ours, theirs, gradients[0]


@pytest.mark.parametrize("clip_scale", [1.0, 0.5])
@pytest.mark.parametrize("dram", [LITTLE, AMPLE])
def test_commit_amid_the_update_of_a_unit(flash, monkeypatch, clip_scale, dram):
    """The updater stops within a unit, until the commit is made or throws its updates away."""
    ours, theirs, last = speculating(flash, monkeypatch, clip_scale, dram)
    branch, reached, decided = ours._pipeline._speculation.branch, [], threading.Event()
    real, update = ours._updates.apply, ours._pipeline._updater._updates

    def slow_update(*block):
        reached.append(block)
        while len(reached) == 2 and not (decided.is_set() or branch.is_dropped):
            time.sleep(0.001)
        real(*block)

    monkeypatch.setattr(update, "_apply", slow_update)
    for store in (ours, theirs):
        store.receive(0, last)
    deadline = time.monotonic() + 60
    while len(reached) < 2:
        assert time.monotonic() < deadline, "the unit of stage 0 is not updated"
        time.sleep(0.001)
    assert 0 in branch.started
    assert 0 not in branch.updated
    for store in (ours, theirs):
        store.commit()
    assert (branch.is_adopted, branch.is_dropped) == (clip_scale == 1.0, clip_scale != 1.0)
    decided.set()
    same(ours, theirs)
    for store in (ours, theirs):
        backward_too(store, 2)
    same(ours, theirs)


@pytest.mark.parametrize("dram", [LITTLE, AMPLE])
def test_what_is_read_before_the_commit_is_the_last_step(flash, monkeypatch, tmp_path, dram):
    ours, theirs, last = speculating(flash, monkeypatch, 1.0, dram)
    before = training_store(theirs.program)
    before.load(random_weights(theirs.program, 1).items())
    backward_too(before, 2)
    assert ours.compared()
    same(ours, before)
    portions = ours.portions(1 << 20)
    held = [np.array(portions.read(number)) for number in range(len(portions.sizes))]
    ours.make_durable()
    assert ours.durable_step == 2
    for store in (ours, theirs):
        store.receive(0, last)
        store.commit()
    assert traffic_of(ours)[0] > 0
    same(ours, theirs)
    assert sum(map(len, held)) > 0
    copy = flash(ours.program, "copy", dram=dram)
    copy.begin_restore()
    there = copy.portions(1 << 20)
    for number, portion in enumerate(held):
        there.write(number, portion)
    copy.finish_restore(2)
    same(copy, before)


@pytest.mark.parametrize("dram", [LITTLE, AMPLE])
def test_weights_fetched_before_the_commit_are_those_of_the_last_step(flash, monkeypatch, dram):
    ours, theirs, last = speculating(flash, monkeypatch, 1.0, dram)
    for name, view in forward_sweep(theirs).items():
        assert torch.equal(forward_sweep(ours)[name], view)
    assert traffic_of(ours)[1] > 0
    for store in (ours, theirs):
        store.receive(0, last)
        store.commit()
    same(ours, theirs)


@pytest.mark.parametrize("dram", [LITTLE, AMPLE])
def test_discarded_step_is_replayed_with_other_gradients(flash, monkeypatch, dram):
    ours, theirs, _ = speculating(flash, monkeypatch, 1.0, dram)
    ours._speculator._guesses = Fixed(1.0, waits=True)
    for store in (ours, theirs):
        store.discard()
    assert traffic_of(ours)[1] > 0
    assert backward_too(ours, 2, seed=9) == backward_too(theirs, 2, seed=9)
    assert traffic_of(ours)[0] > 0
    same(ours, theirs)


@pytest.mark.parametrize("stage", [8, 4, 0])
def test_not_a_number_throws_all_updates_away(flash, monkeypatch, stage):
    ours, theirs = pair(flash, monkeypatch, "on", dram=AMPLE)
    for store in (ours, theirs):
        backward_too(store, 2)
        store.take_flash_traffic()
        forward_sweep(store)
        gradients = random_gradients(ours.program, np.random.default_rng(3))
        gradients[stage][0][3] = float("nan")
        send(store, gradients)
        with pytest.raises(NonFiniteError, match=rf"NaN or infinity .* stage{stage}"):
            store.commit()
    assert traffic_of(ours)[1] == (8 - stage) * 8192 * 12
    for store in (ours, theirs):
        store.discard()
        backward_too(store, 2)
    same(ours, theirs)


def test_weights_that_no_update_changes_are_named_after_a_wrong_guess(flash, monkeypatch):
    """With the guessed factor they would change; with the decided one gradients are too small."""
    program, guess = make_program([{"a": (64, 64)}, {"b": (64, 64)}]), Fixed(0.5, waits=True)
    settings = {"optimizer": SGD(), "clip_norm": 1e-12}
    ours = flash(program, dram=AMPLE, **settings)
    ours._updates._groups = dict.fromkeys(program.weights, GroupSettings(1.0, 0.0, None))
    theirs = training_store(program, weight_decay=0.0, **settings)
    ours._speculator._guesses = guess
    for store in (ours, theirs):
        store.load(random_weights(program, 1).items())
        backward_too(store, 1)
        store.flush()
    assert traffic_of(ours)[1] > 0
    assert ours.unchanged() == theirs.unchanged() == ("a", "b")


def test_store_is_closed_amid_speculation_and_opens_at_the_last_step(flash, monkeypatch):
    ours, theirs, _ = speculating(flash, monkeypatch, 1.0, LITTLE)
    ours.close()
    again = flash(ours.program, dram=LITTLE)
    assert again.step == 2
    backward_too(again, 1)
    theirs.discard()
    backward_too(theirs, 1)
    same(again, theirs)


def test_guesses_that_the_environment_forces(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert forced_guesses() is None
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "off")
    assert forced_guesses().of(1) is None
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "mixed:3")
    drawn = [forced_guesses().of(step) for step in range(40)]
    assert {None if each is None else each.clip_scale > 1 for each in drawn} == {None, True, False}
    assert ForcedGuesses("wrong").of(1).clip_scale > 1.0
    for refused in ("sometimes", "mixed:x"):
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, refused)
        with pytest.raises(ConfigError, match=f"PENSTOCK_SPECULATE: expected .*{refused}"):
            forced_guesses()


def test_adaptive_speculation_changes_no_bit(flash, monkeypatch):
    """The disk is the slowest here, and norms are around the limit."""
    ours, theirs = pair(flash, monkeypatch, "", dram=LITTLE, clip_norm=240.0, speculate="auto")
    for scale in (1.0, 0.5, 1.0, 0.9, 2.0, 0.7, 0.3, 0.3, 1.5, 0.3, 0.3):
        assert backward_too(ours, 1, scale=scale) == backward_too(theirs, 1, scale=scale)
    same(ours, theirs)


class Unsteady:
    """Right and wrong guesses of some of the units, waited for or not."""

    def __init__(self, seed):
        self.seed = seed

    def of(self, step):
        drawn = random.Random(f"{self.seed} {step}")
        factor = drawn.choice((None, 1.0, 1.0, 1.0, 0.5))
        units = drawn.getrandbits(9) | drawn.choice((0, 0x1FF))
        waits = drawn.random() < 0.2
        return (
            None if factor is None else Guess(factor, lambda unit: bool(units >> unit & 1), waits)
        )

    def expects(self, stage, squares):
        return random.Random(f"{self.seed} {stage} {squares}").random() < 0.9

    def decided(self, decision, was_right):
        pass


@pytest.mark.parametrize(
    "seed",
    [
        *range(6),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 18)),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(18, 60)),
    ],
)
def test_any_memory_disk_and_timing(flash, monkeypatch, seed):
    """A disk whose reads and writes take random times; steps that are interrupted and replayed."""
    drawn = random.Random(seed)
    least = 4 * 2048 * (8 + 4) + 4 * STAGE
    ours, theirs = pair(
        flash,
        monkeypatch,
        "",
        dram=least + drawn.randrange(0, 24) * STAGE // 2,
        keep_steps=drawn.choice((1, 2)),
        durable_every=drawn.choice((1, 1, 1, 2)),
        optimizer=drawn.choice((AdamW(0.9, 0.95, 1e-8), SGD(0.9), SGD())),
    )
    ours._speculator._guesses = Unsteady(seed)
    slow_reads, slow_writes = drawn.choice(((0, 0), (2e-3, 0), (0, 2e-3), (1e-3, 1e-3)))
    read_at, write_at = medium.read_at, medium.write_at

    def slow_read(*rest):
        time.sleep(slow_reads * random.random())
        return read_at(*rest)

    def slow_write(*rest):
        time.sleep(slow_writes * random.random())
        return write_at(*rest)

    monkeypatch.setattr(medium, "read_at", slow_read)
    monkeypatch.setattr(medium, "write_at", slow_write)
    for _ in range(12):
        if drawn.random() < 0.2:  # an attempt that ends in its backward sweep
            forward_sweep(ours)
            gradients = random_gradients(ours.program, np.random.default_rng(seed))
            for stage in range(8, drawn.randrange(0, 9) - 1, -1):
                ours.fetch(stage)
                ours.receive(stage, gradients[stage])
            if drawn.random() < 0.5:
                forward_sweep(ours)
            ours.discard()
        assert backward_too(ours, 1, seed) == backward_too(theirs, 1, seed)
        if drawn.random() < 0.1:
            same(ours, theirs)
    same(ours, theirs)
