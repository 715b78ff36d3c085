"""Shards with a replica each: whoever is lost, and when, no step is lost and no bit changes.

At every point of the step protocol in turn a node is killed or stands still until it counts as
lost; and in random runs all else goes wrong at the same time. In memory nobody can go back: as long
as a shard has a node that is left, nobody needs to.
"""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from grids import quick_first
from toy_cluster import FIRST_ENGINE, HELD, ToyCluster
from toy_model import STAGES, STEPS, WEIGHTS, reference

from penstock.distributed.protocol import MessageType
from penstock.distributed.simulation import Faults
from penstock.distributed.simulation.faults import Rates
from penstock.errors import CorruptionError

LOSSES, EXPECTED = reference(STEPS + 1)
SHARDS, REPLICAS, ENGINES = 2, 2, 2
NODES = [1, 2, 3, 4, FIRST_ENGINE]  # of both shards the first nodes, then their replicas
FATES = [f"{what} {node}" for what in ("kill", "zombie") for node in NODES]
BOUNDS = [WEIGHTS * shard // SHARDS for shard in range(SHARDS + 1)]
WEIGHTS_OF = [range(*BOUNDS[shard : shard + 2]) for shard in range(SHARDS)]
SPREAD = 12  # points of each fate that `make test` tries


def require_same(cluster: ToyCluster, outcomes, steps: int = STEPS) -> None:
    assert [list(outcome.losses) for outcome in outcomes] == LOSSES[:steps]
    assert all(shard.step == steps for shard in cluster.shards)
    made = cluster.weights()  # of every node
    if steps == STEPS + 1:
        for found, wanted in zip(made, EXPECTED, strict=True):
            np.testing.assert_array_equal(found, wanted)


def kinds(cluster: ToyCluster) -> set[str]:
    return {happened.kind for happened in cluster.happened}


def require_nothing_lost(cluster: ToyCluster) -> None:
    """The run has neither gone back nor waited for anybody."""
    assert not kinds(cluster) & {"shard lost", "went back"}


def ended(cluster: ToyCluster, outcomes) -> None:
    """Have whatever is late come, and make one more step, with those who came back."""
    cluster.network.run(lambda: False, cluster.network.now + 4)
    outcomes += cluster.train(STEPS + 1, first=STEPS + 1)
    require_same(cluster, outcomes, STEPS + 1)


@functools.cache
def points() -> int:
    """How many messages a run without faults delivers."""
    cluster = ToyCluster(ENGINES, SHARDS, replicas=REPLICAS, on_flash=False)
    outcomes = cluster.train()
    require_same(cluster, outcomes)
    return cluster.network.delivered


def survive_point(point: int, fate: str) -> None:
    cluster = ToyCluster(ENGINES, SHARDS, replicas=REPLICAS, on_flash=False)
    number = fate.split()[1]
    cluster.strike_at(point, fate)
    try:
        ended(cluster, cluster.train())
        require_nothing_lost(cluster)
        if int(number) < FIRST_ENGINE:
            assert "replica lost" in kinds(cluster)
            assert len(cluster.shards) == SHARDS * REPLICAS, "the replica is not back"
    except BaseException:
        print(f"{fate} at message {point}: {cluster.happened}")
        raise


@pytest.mark.long
@pytest.mark.parametrize("fate", FATES)
def test_node_lost_at_many_points_causes_no_rollback(fate):
    offset = sum(map(ord, fate)) % (points() // SPREAD)
    for point in range(offset, points(), points() // SPREAD):
        survive_point(point, fate)


@pytest.mark.slow
@pytest.mark.parametrize("fate", FATES)
def test_node_lost_at_every_point_causes_no_rollback(fate):
    for point in range(points()):
        survive_point(point, fate)


@pytest.mark.parametrize("replica", [1, 3])
def test_late_begin_at_a_replica_repeats_no_step(replica):
    """The other replica streams meanwhile, so gradients overtake the message."""
    cluster = ToyCluster(ENGINES, SHARDS, replicas=REPLICAS, on_flash=False)
    carry, late = cluster.network._faults.carry, []

    def hold_back(now, sender, to, message):
        copies = carry(now, sender, to, message)
        if message.kind is MessageType.BEGIN and to == replica and message.step == 3:
            late.append(message)
            return [(delay + 0.3, copy) for delay, copy in copies]
        return copies

    cluster.network._faults.carry = hold_back
    ended(cluster, cluster.train())
    assert len(late) == 1
    assert "retry" not in kinds(cluster)


def trouble(seed: int) -> tuple[ToyCluster, bool, dict]:
    """A cluster in which everything that the seed says goes wrong; what that is.

    In memory a shard never loses its last node, so that nothing may go back; on flash it may. There
    messages are lost and damaged too, for which a node may lose its place that is quite sound.
    """
    chance = random.Random(seed)
    on_flash = chance.random() < 0.4
    engines, shards = chance.randint(1, 4), chance.randint(1, 3)
    kinds = ["repeated", "delayed", *(["flipped", "lost"] if on_flash else [])]
    rates = {kind: chance.choice([0, 0, 0.002, 0.01]) for kind in kinds}
    holders = range(1, 1 + shards * REPLICAS)
    numbers = [*holders, *range(FIRST_ENGINE, FIRST_ENGINE + engines)]
    cuts = {}
    if on_flash and chance.random() < 0.4:
        begin = chance.uniform(0, 0.2)
        a, b = sorted(chance.sample(numbers, 2))
        cuts[a, b] = (begin, begin + chance.uniform(0.01, 20))
    faults = Faults(seed, Rates(**rates), cuts, until=8.0)
    notice, speed = chance.choice([0.02, None]), random.Random(-seed)
    costs = chance.choice([[0.002], [0.0005, 0.002, 0.01], [0.0, 0.002, 0.002, 0.1]])
    cluster = ToyCluster(
        engines,
        shards,
        faults,
        notice=notice,
        cost=lambda: speed.choice(costs),
        replicas=REPLICAS,
        on_flash=on_flash,
    )
    network = cluster.network
    plan = {"flash": on_flash, "engines": engines, "shards": shards, "rates": rates, "cuts": cuts}
    plan |= {"notice": notice, "costs": costs}

    def at(name: str, action, delay: float = 0.1) -> None:
        moment = chance.expovariate(1 / delay)
        plan.setdefault("events", []).append((round(moment, 4), name))
        network.after(moment, action)

    def strike(shard: int, place: int, kill: bool, delay: float) -> None:
        """End a node of a shard, whichever has that place then, or let it be a zombie."""
        nodes = cluster.coordinator.holders[shard]
        there = [node for node in nodes if cluster._is_there(node)]
        if not there or (len(there) == 1 and not on_flash):
            return
        number = there[place % len(there)]
        if kill:
            network.kill(number)
        else:
            cluster.stop_until_lost(number, delay)

    def strike_learner() -> None:
        for number in cluster.coordinator.learners[:1]:
            network.kill(number)

    for _ in range(chance.choice([1, 1, 2, 3, 5])):
        shard, place = chance.randrange(shards), chance.randrange(REPLICAS)
        kill, delay = chance.random() < 0.6, chance.uniform(0, 0.06)
        blow = functools.partial(strike, shard, place, kill, delay)
        at(f"strike {shard, place, kill, delay}", blow, chance.choice([0.1, 0.1, 1.0]))
    if chance.random() < 0.3:
        at("strike a learner", strike_learner, 0.5)
    for number in range(FIRST_ENGINE, FIRST_ENGINE + engines):
        if chance.random() < 0.25:
            at(f"kill {number}", functools.partial(network.kill, number))
            at("join", cluster.join)
    network.after(30.0, cluster.join)  # there is always somebody in the end
    return cluster, on_flash, plan


def survive(seed: int) -> set[str]:
    cluster, on_flash, plan = trouble(seed)
    try:
        ended(cluster, cluster.train())
        if not on_flash:
            require_nothing_lost(cluster)
        elif "shard lost" not in kinds(cluster):
            assert "went back" not in kinds(cluster)
    except BaseException:
        print(f"seed {seed}: {plan}")
        for happened in cluster.happened:
            print("  ", happened)
        raise
    return kinds(cluster)


@pytest.mark.parametrize("first", quick_first([0, 75], [0]))
def test_faults_do_not_change_result_with_replicas(first):
    happened = [survive(seed) for seed in range(first, first + 75)]
    assert sum("replica lost" in each for each in happened) > 37, "the seeds do too little"
    assert any("shard lost" in each for each in happened)


@pytest.mark.parametrize("on_flash", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_flipped_bit_in_replica_ends_run_within_one_comparison_cycle(seed, on_flash):
    """In weights and in moments, before any step, in the node that streams or in the other one."""
    chance = random.Random(seed)
    cluster = ToyCluster(ENGINES, SHARDS, replicas=REPLICAS, on_flash=on_flash)
    flipped_after, turn = chance.randrange(1, HELD), chance.randrange(HELD)
    node = cluster.coordinator.holders[shard := chance.randrange(SHARDS)][
        chance.randrange(REPLICAS)
    ]
    element = WEIGHTS_OF[shard][chance.randrange(len(WEIGHTS_OF[shard]))]
    cluster.train(flipped_after)
    cluster.stores[node].flip(turn, element, chance.randrange(31))
    with pytest.raises(CorruptionError) as found:
        cluster.train(flipped_after + HELD, first=flipped_after + 1)
    kind = "moment" if turn >= STAGES else "weights"
    steps = [cluster.stores[n].step for nodes in cluster.coordinator.holders for n in nodes]
    assert max(steps) < flipped_after + HELD
    assert f"shard {shard}: the replicas on nodes {1 + shard} and {3 + shard} must be equal" in str(
        found.value
    )
    assert f"differ in the {kind} of stage {turn % STAGES}; step" in str(found.value)
    assert "The memory or the processor of one of their hosts is faulty" in str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(1, 11))
def test_faults_do_not_change_result_with_replicas_long(thousand):
    for seed in range(1000 * thousand, 1000 * thousand + 1000):
        survive(seed)
