"""A simulated run in which everything that a seed says goes wrong, and what must come of it."""

from __future__ import annotations

import random

import numpy as np
from toy_cluster import FIRST_ENGINE, FIRST_RELAY, ToyCluster
from toy_model import STEPS, reference

from penstock.distributed.simulation import Faults
from penstock.distributed.simulation.faults import Rates

LOSSES, WEIGHTS = reference()


def require_same(cluster: ToyCluster, outcomes) -> None:
    assert [list(outcome.losses) for outcome in outcomes] == LOSSES
    for made, wanted in zip(cluster.weights(), WEIGHTS, strict=True):
        np.testing.assert_array_equal(made, wanted)
    assert all(shard.step == STEPS for shard in cluster.shards)


def trouble(seed: int, with_relays: bool) -> tuple[ToyCluster, dict]:
    """A cluster in which everything that the seed says goes wrong; and what that is."""
    chance = random.Random(seed)
    engines, shards = chance.randint(1, 5), chance.randint(1, 3)
    # A step has some hundred frames: of more bit flips it is given up, as real ones are.
    most = {"lost": 0.01, "repeated": 0.01, "delayed": 0.01, "flipped": 0.004}
    rates = {kind: chance.choice([0, 0, 0.002, rate]) for kind, rate in most.items()}
    cuts = {}
    numbers = [*range(1, 1 + shards), *range(FIRST_ENGINE, FIRST_ENGINE + engines)]
    relays = chance.randint(1, 7) if with_relays else 0
    numbers += range(FIRST_RELAY, FIRST_RELAY + relays)
    if len(numbers) > 1 and chance.random() < 0.3:
        begin = chance.uniform(0, 0.2)
        a, b = sorted(chance.sample(numbers, 2))
        cuts[a, b] = (begin, begin + chance.uniform(0.01, 20))
    faults = Faults(seed, Rates(**rates), cuts, until=8.0)
    notice = chance.choice([0.02, None])
    speed = random.Random(-seed)
    costs = chance.choice([[0.002], [0.0005, 0.002, 0.01], [0.0, 0.002, 0.002, 0.1]])
    cluster = ToyCluster(
        engines,
        shards,
        faults,
        notice=notice,
        cost=lambda: speed.choice(costs),
        relays=relays,
        sends_ahead=with_relays and seed % 2 == 0,
    )
    network = cluster.network
    plan = {
        "engines": engines,
        "shards": shards,
        "relays": relays,
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
    for number in range(FIRST_RELAY, FIRST_RELAY + relays):
        fate = chance.random()
        if fate < 0.25:
            at(f"kill {number}", lambda number=number: network.kill(number))
            if chance.random() < 0.5:
                at("join a relay", cluster.join_relay)
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
    if with_relays and chance.random() < 0.3:
        most = chance.randint(0, 9)
        at(f"{most} relays", lambda: setattr(cluster.coordinator, "wanted_relays", most))
    # There is always somebody in the end: a spare that comes late.
    network.after(30.0, cluster.join)
    return cluster, plan


def survive(seed: int, with_relays: bool = False) -> None:
    """Train while everything that the seed says goes wrong; the bits must be the same."""
    cluster, plan = trouble(seed, with_relays)
    try:
        require_same(cluster, cluster.train())
    except BaseException:
        print(f"seed {seed}: {plan}")
        for happened in cluster.happened:
            print("  ", happened)
        raise
