"""The step protocol under every fault: the same bits come of it, and nothing counts twice."""

from __future__ import annotations

import pytest
from grids import quick_first
from simulated_trouble import require_same, survive
from toy_cluster import FIRST_ENGINE, ToyCluster
from toy_model import STEPS

from penstock.distributed.protocol import connections
from penstock.distributed.protocol.messages import Message, MessageType


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
    assert gone == connections(engines, shards)


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
