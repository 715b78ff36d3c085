"""A step is decided once, from all reports, and every shard commits by that decision alone."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
from sharded_stores import LARGE, assert_same_state, sharded_dram
from store_programs import (
    LAYERS,
    flash_store,
    forward_sweep,
    make_program,
    random_gradients,
    random_weights,
    send,
    training_store,
)

from penstock.distributed.rpc.commit_codec import body_of_decision, decision_of
from penstock.distributed.worker.shard_executor import LocalShardExecutor
from penstock.errors import ProtocolError, StorageError
from penstock.step_schedule import StepSchedule
from penstock.store import CommitRule, Decision, Schedule, merged

LINEAR = Schedule("linear", peak=3e-3, decay_steps=40, warmup_steps=10)


def gradients_of(program, seed):
    return random_gradients(program, np.random.default_rng(seed))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.5, 1e6])
def test_decision_follows_the_formulas_for_any_number_of_shards(count, clip_norm):
    program, rule = make_program(LARGE), CommitRule(LINEAR, clip_norm)
    store = sharded_dram(program, count)
    store.load(random_weights(program, 1).items())
    gradients = gradients_of(program, 7)
    send(store, gradients)
    report = merged(program, [shard.prepare() for shard in store.shards])
    decision = rule.decide(program, 4, report).decision

    whole = {}  # of a tied weight both parts are added before anything is squared
    for stage in program.stages:
        for name, gradient in zip(stage.weights, gradients[stage.index], strict=True):
            whole[name] = whole.get(name, 0) + gradient.numpy()
    norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in whole.values()))
    assert decision.step == 4
    assert decision.norm == pytest.approx(norm, rel=1e-6)
    limit = math.inf if clip_norm is None else clip_norm
    assert decision.clip_scale == pytest.approx(min(1.0, limit / (norm + 1e-6)), rel=1e-6)
    assert decision.learning_rate == pytest.approx(3e-3 * 3 / 10, rel=1e-12)  # the first is 0


def test_shards_given_a_decision_equal_a_store_that_decides():
    program, rule = make_program(LARGE), CommitRule(LINEAR, 0.5)
    one = training_store(program, schedule=LINEAR, clip_norm=0.5)
    shards = sharded_dram(program, 2)  # with a rule of their own, which nobody asks for
    for store in (one, shards):
        store.load(random_weights(program, 1).items())
    for seed in range(3):
        for store in (one, shards):
            forward_sweep(store)
            send(store, gradients_of(program, seed))
        own = one.commit()
        report = merged(program, [shard.prepare() for shard in shards.shards])
        told = rule.decide(program, seed + 1, report)
        assert told == own
        for shard in shards.shards:
            shard.decide(told.decision)
    assert_same_state(shards, one)


@pytest.mark.parametrize("of", ["memory", "flash"])
@pytest.mark.parametrize("step", [1, 3])
def test_decision_of_another_step_is_refused_and_changes_nothing(tmp_path, of, step):
    program = make_program(LAYERS)
    store = training_store(program) if of == "memory" else flash_store(program, tmp_path / "s")
    store.load(random_weights(program, 1).items())
    send(store, gradients_of(program, 1))
    store.commit()
    send(store, gradients_of(program, 2))
    decision = CommitRule(LINEAR).decide(program, 2, store.prepare()).decision
    with pytest.raises(
        StorageError, match=rf"is at step 1: expected .* step 2, got one for step {step},"
    ):
        store.decide(dataclasses.replace(decision, step=step))
    assert store.step == 1
    store.decide(decision)
    assert store.step == 2
    store.close()


@pytest.mark.parametrize("seed", range(5))
def test_decision_keeps_all_bits_in_a_message(seed):
    chance = np.random.default_rng(seed)
    decision = Decision(int(chance.integers(1, 1 << 40)), *map(float, chance.random(3) / 3))
    assert decision_of(body_of_decision(decision)) == decision


@pytest.mark.parametrize(
    "change",
    [{"norm": "nan"}, {"clip_scale": "inf"}, {"learning_rate": 1.0}, {"step": None}, {"norm": ...}],
)
def test_malformed_decision_is_refused(change):
    body = {**body_of_decision(Decision(1, 2.0, 0.5, 1e-3)), **change}
    said = {key: value for key, value in body.items() if value is not ...}
    with pytest.raises(ProtocolError, match=r"expected a decision, got .* same version"):
        decision_of(said)


def test_a_shard_refuses_a_commit_whose_decision_is_for_another_step():
    program = make_program(LAYERS)
    store = training_store(program)
    store.load(random_weights(program, 1).items())
    send(store, gradients_of(program, 1))
    work = LocalShardExecutor(SimpleNamespace(store=store), 0, StepSchedule.by_step(program))
    decision = CommitRule(LINEAR).decide(program, 1, store.prepare()).decision
    with pytest.raises(ProtocolError, match="expected a decision for step 2, got one for step 1"):
        work.commit(2, body_of_decision(decision))
    assert store.step == 0
    assert work.commit(1, body_of_decision(decision)) == {"step": 1}
    assert store.step == 1
