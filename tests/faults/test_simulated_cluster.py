"""The step protocol under every fault: the same bits come of it, and nothing counts twice."""

from __future__ import annotations

import random

import numpy as np
import pytest
from grids import quick_first
from toy_cluster import FIRST_ENGINE, STEPS, ToyCluster, reference

from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.protocol.tree_topology import tree_connections
from penstock.distributed.simulation import Faults
from penstock.distributed.simulation.faults import Rates

LOSSES, WEIGHTS = reference()


def require_same(cluster: ToyCluster, outcomes) -> None:
    assert [list(outcome.losses) for outcome in outcomes] == LOSSES
    for made, wanted in zip(cluster.weights(), WEIGHTS, strict=True):
        np.testing.assert_array_equal(made, wanted)
    assert all(shard.step == STEPS for shard in cluster.shards)


@pytest.mark.parametrize("engines", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_number_of_engines_and_shards_does_not_change_bits(engines, shards):
    cluster = ToyCluster(engines, shards)
    require_same(cluster, cluster.train())
    sent = sum(cluster.nodes[1 + s].sent_bytes for s in range(shards))
    assert sent == STEPS * cluster.plan.weight_bytes  # whatever the number of engines
    taken = sum(cluster.network.taken_bytes[1 + s] for s in range(shards))
    assert taken == STEPS * cluster.plan.gradient_bytes


@pytest.mark.parametrize(("engines", "shards"), [(1, 1), (2, 1), (3, 2), (5, 1)])
def test_connections_are_those_that_memory_budget_counts(engines, shards):
    cluster, gone = ToyCluster(engines, shards), set()
    send = cluster.network.send

    def place(number: int) -> int:
        return number - FIRST_ENGINE if number >= FIRST_ENGINE else -number

    def note(sender: int, to: int, message: Message) -> None:
        if message.kind in (MessageType.WEIGHTS, MessageType.GRADIENT):
            gone.add((place(sender), place(to)))
        send(sender, to, message)

    cluster.network.send = note
    cluster.train(2)
    assert gone == tree_connections(engines, shards)


def trouble(seed: int) -> tuple[ToyCluster, dict]:
    """A cluster in which everything that the seed says goes wrong; and what that is."""
    chance = random.Random(seed)
    engines, shards = chance.randint(1, 5), chance.randint(1, 3)
    # A step has some hundred frames: of more bit flips it is given up, as real ones are.
    most = {"lost": 0.01, "repeated": 0.01, "delayed": 0.01, "flipped": 0.004}
    rates = {kind: chance.choice([0, 0, 0.002, rate]) for kind, rate in most.items()}
    cuts = {}
    numbers = [*range(1, 1 + shards), *range(FIRST_ENGINE, FIRST_ENGINE + engines)]
    if len(numbers) > 1 and chance.random() < 0.3:
        begin = chance.uniform(0, 0.2)
        a, b = sorted(chance.sample(numbers, 2))
        cuts[a, b] = (begin, begin + chance.uniform(0.01, 20))
    faults = Faults(seed, Rates(**rates), cuts, until=8.0)
    notice = chance.choice([0.02, None])
    speed = random.Random(-seed)
    costs = chance.choice([[0.002], [0.0005, 0.002, 0.01], [0.0, 0.002, 0.002, 0.1]])
    cluster = ToyCluster(engines, shards, faults, notice=notice, cost=lambda: speed.choice(costs))
    network = cluster.network
    plan = {
        "engines": engines,
        "shards": shards,
        "rates": rates,
        "cuts": cuts,
        "notice": notice,
        "costs": costs,
    }

    def at(name: str, action) -> None:
        moment = chance.expovariate(1 / 0.1)
        plan.setdefault("events", []).append((round(moment, 4), name))
        network.after(moment, action)

    def stop(number: int, length: float, until_lost: bool) -> None:
        if until_lost:
            cluster.stop_until_lost(number, length / 50)
        else:
            network.stop(number)
            network.after(length, network.resume, number)

    def at_stop(number: int) -> None:
        length, until_lost = chance.uniform(0.01, 3), chance.random() < 0.5
        at(f"stop {number} {length, until_lost}", lambda: stop(number, length, until_lost))

    for number in range(FIRST_ENGINE, FIRST_ENGINE + engines):
        fate = chance.random()
        if fate < 0.25:
            at(f"kill {number}", lambda number=number: network.kill(number))
            at("join", cluster.join)  # a replacement
        elif fate < 0.45:
            at_stop(number)
    for number in range(1, 1 + shards):
        fate = chance.random()
        if fate < 0.15:
            at(f"kill {number}", lambda number=number: network.kill(number))
        elif fate < 0.25:
            at_stop(number)
    for _ in range(chance.choice([0, 0, 1, 2])):
        at("join", cluster.join)
    if chance.random() < 0.3:
        wanted = chance.randint(1, 6)
        at(f"scale to {wanted}", lambda: setattr(cluster.coordinator, "wanted", wanted))
    # There is always somebody in the end: a spare that comes late.
    network.after(30.0, cluster.join)
    return cluster, plan


def survive(seed: int) -> None:
    cluster, plan = trouble(seed)
    try:
        require_same(cluster, cluster.train())
    except BaseException:
        print(f"seed {seed}: {plan}")
        for happened in cluster.happened:
            print("  ", happened)
        raise


def test_early_reuse_of_store_memory_is_detected():
    """So what is read later than a store allows changes the results of these tests."""
    cluster = ToyCluster(3, 2)
    for shard in cluster.shards:
        del shard.handed_out[1:]
    with pytest.raises(AssertionError):
        require_same(cluster, cluster.train())


@pytest.mark.parametrize("hundred", quick_first(range(5), [0]))
def test_faults_do_not_change_result(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        survive(seed)


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(1, 21))
def test_faults_do_not_change_result_long(thousand):
    for seed in range(1000 * thousand, 1000 * thousand + 1000):
        survive(seed)
