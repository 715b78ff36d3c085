"""The simulated cluster of `benchmarks/weak_scaling.py`: what a step takes and moves, what fits."""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest

from penstock.config import Config
from penstock.distributed.simulation import Links
from penstock.errors import BudgetError
from penstock.planning.builders import build_program

LENGTH, SEQUENCES, FLOPS = 32, 3, 1e9


@pytest.fixture(scope="module")
def program():
    config = Config.from_mapping({"model": "tiny"}, [])
    return build_program(config, micro_batch=1, sequence_length=LENGTH, precision="bf16")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("weak_scaling")


@pytest.fixture
def load(script):
    return script.Load("tiny", "bf16", SEQUENCES, LENGTH)


def machine_like(machine, **changes):
    return dataclasses.replace(machine, flops=FLOPS, memory_bytes=10**9, **changes)


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 2])
def test_without_link_time_any_number_of_engines_takes_the_time_of_one(
    script, program, load, shards
):
    machine = machine_like(
        script.CS2, links=Links(latency=0.0), shards=shards, store_bytes_per_second=float("inf")
    )
    plan, _ = script.fit(machine, program, load)
    transfers = script.transfers_of(program, machine, plan.recompute, 8)
    kinds = [stage.kind for stage in program.stages]
    again = [stage.kind for stage in program.stages if stage.index in plan.recompute]
    assert len(again) == 3  # the blocks: there is nothing to make again before and after them
    flops = sum(kind.forward_flops + kind.backward_flops for kind in kinds)
    flops += sum(kind.forward_flops for kind in again)
    for engines in (1, 2, 3):
        made = script.measure(
            machine, program, transfers, engines, SEQUENCES, LENGTH, plan.recompute
        )
        assert made.seconds == pytest.approx(SEQUENCES * flops / FLOPS, rel=1e-9)


@pytest.mark.long
def test_store_traffic_is_independent_of_the_number_of_engines(script, program, load):
    machine = machine_like(script.CS2)
    plan, _ = script.fit(machine, program, load)
    transfers = script.transfers_of(program, machine, plan.recompute, 8)
    per_stage = [sum(program.weights[n].elements for n in s.weights) for s in program.stages]
    # Weights go twice, 4 bytes each on this machine, but for the last stage's, which turns, and the
    # first one's, whose gradients are made without them; gradients go once.
    twice = per_stage + per_stage[1:-1]
    for engines in (1, 2, 3):
        made = script.measure(
            machine, program, transfers, engines, SEQUENCES, LENGTH, plan.recompute
        )
        assert made.store_sent == 4 * sum(twice)
        assert made.store_taken == 4 * sum(per_stage)
        assert made.most_sent <= 4 * (2 * sum(twice) + 2 * sum(per_stage)) + 10_000


@pytest.mark.long
@pytest.mark.parametrize(("engines", "relays"), [(2, 3), (4, 5), (4, 12)])
def test_engine_of_a_cluster_with_relays_moves_its_own_bytes(
    script, program, load, engines, relays
):
    machine = machine_like(script.CS2)
    plan, _ = script.fit(machine, program, load)
    transfers = script.transfers_of(program, machine, plan.recompute, 8)
    size = SEQUENCES, LENGTH, plan.recompute
    made = script.measure(machine, program, transfers, engines, *size, relays)
    assert made.store_sent == made.most_taken - SEQUENCES * LENGTH * 4  # rows of the next step
    assert made.store_sent == transfers.weight_bytes
    assert made.most_sent == made.store_taken == transfers.gradient_bytes


def test_automatic_relays_are_those_of_a_run(script, load):
    automatic = dataclasses.replace(load, relays="auto")
    assert [automatic.relays_of(engines) for engines in (1, 8, 192)] == [0, 10, 280]
    assert load.relays_of(192) == 0


def test_links_bound_a_step_in_which_nothing_is_computed(script, program, load):
    rate = 1e6
    machine = machine_like(script.CS2, links=Links(rate, 0.0), store_bytes_per_second=float("inf"))
    plan, _ = script.fit(machine, program, load)
    transfers = script.transfers_of(program, machine, plan.recompute, 8)
    bytes_both_ways = transfers.weight_bytes, transfers.gradient_bytes
    seconds = [
        script.measure(machine, program, transfers, engines, 0, LENGTH, plan.recompute).seconds
        for engines in (1, 2, 3)
    ]
    assert seconds[0] > max(bytes_both_ways) / rate
    assert seconds[0] < seconds[1] < seconds[2] < 4 * sum(bytes_both_ways) / rate


def test_a_curve_has_an_efficiency_for_every_number_of_engines(script, load, capsys):
    machine = machine_like(script.H200)
    points = [script.point(machine, load, engines) for engines in (1, 2, 3)]
    found = script.curve(script.Goal(machine, load, 0.9), points)
    assert found["efficiency"][0] == 1.0
    assert all(0 < share <= 1 for share in found["efficiency"])
    script.show_curve(found | {"layer_difference": 0.00125})
    idle = found["idle_step_seconds"]
    assert 0 < idle[0] < idle[1] <= idle[2]
    printed = capsys.readouterr().out
    for engines, seconds in zip((1, 2, 3), found["step_seconds"], strict=True):
        assert re.search(rf"^ +{engines} +0 +{seconds:.4f} ", printed, re.MULTILINE)
    assert "3 engines: layers 6 to 8 take +0.125% longer than layers 4 to 6" in printed


@pytest.mark.long
@pytest.mark.parametrize("relays", [0, 5])
def test_layers_may_be_repeated_instead_of_simulated(script, load, relays):
    machine = machine_like(script.CS2)
    load = dataclasses.replace(load, layers=14, relays=relays)
    calculated = script.point(machine, load, 4)
    simulated = script.point(machine, load, 4, whole=True)
    assert calculated.step.seconds == pytest.approx(simulated.step.seconds, rel=1e-6)
    assert calculated.idle_seconds == pytest.approx(simulated.idle_seconds, rel=1e-6)
    assert dataclasses.replace(calculated.step, seconds=0.0) == dataclasses.replace(
        simulated.step, seconds=0.0
    )


def test_layers_are_repeated_by_twos_only(script):
    with pytest.raises(ValueError, match="9 layers are not 4 and a multiple of 2 more"):
        script.repeated(lambda layers: script.Measured(layers, 1, 1, 1, 1), 9)


@pytest.mark.parametrize("name", ["CS2", "H200"])
def test_no_efficiency_for_a_batch_that_does_not_fit(script, load, name):
    machine = machine_like(getattr(script, name))
    _, enough = script.fit(machine, script.program_of(load), load)
    exact = dataclasses.replace(machine, memory_bytes=enough)
    assert script.try_out(exact, load, 2)["efficiency"] > 0
    less = dataclasses.replace(machine, memory_bytes=enough - 1)
    refused = script.try_out(less, load, 2)
    assert refused["efficiency"] is None
    needs = re.search(r"the engine needs (\S+) MiB for a step of 3 micro", refused["does_not_fit"])
    assert float(needs[1]) == pytest.approx(enough / 2**20, abs=0.01)
    with pytest.raises(BudgetError, match="the engine needs"):
        script.point(less, load, 2)


def test_messages_count_where_they_lie_in_the_memory_that_computes(script, program, load):
    on_chip, beside = machine_like(script.CS2), machine_like(script.CS2, takes_messages=False)
    stages = [sum(program.weights[n].elements for n in s.weights) for s in program.stages]
    most = max(sum(stages[first : first + 4]) for first in range(len(stages)))
    extra = script.fit(on_chip, program, load)[1] - script.fit(beside, program, load)[1]
    # Two sums of the gradients of four operations; that beside has one more slot for weights.
    assert 2 * 4 * most - 4 * max(stages) <= extra <= 2 * 4 * most + 4 * max(stages)
