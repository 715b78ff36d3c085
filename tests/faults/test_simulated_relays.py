"""Relays between shards and engines, under every fault: the bits are those without them."""

from __future__ import annotations

import pytest
from grids import quick_first
from simulated_trouble import require_same, survive
from toy_cluster import FIRST_ENGINE, FIRST_RELAY, ToyCluster, transfers
from toy_model import MICRO_BATCHES, STEPS

from penstock.distributed.protocol import connections
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.protocol.relay_topology import RelayTrees
from penstock.distributed.simulation import Faults
from penstock.distributed.simulation.faults import Rates

FINE = 4  # bytes of a chunk, so that every tree of many relays has some


def kinds(cluster: ToyCluster) -> list[str]:
    return [event.kind for event in cluster.happened]


@pytest.fixture
def deep_trees(monkeypatch):
    """Trees of fan-out 2 wherever there are relays enough; so few engines would have flat ones."""
    chosen = RelayTrees.of

    def trees(engines: int, relays: int) -> RelayTrees:
        levels = (1,) if engines <= 2 else (1, 2) if engines <= 4 else (1, 2, -(-engines // 2))
        lanes = relays // sum(levels)
        return RelayTrees(engines, lanes, 2, levels) if lanes else chosen(engines, relays)

    monkeypatch.setattr(RelayTrees, "of", trees)


@pytest.mark.parametrize(
    ("engines", "shards", "relays"),
    [(1, 1, 1), (2, 1, 1), (2, 2, 3), (3, 2, 2), (3, 1, 4), (5, 3, 2), (8, 2, 1), (8, 3, 9)],
)
def test_number_of_relays_does_not_change_bits(engines, shards, relays):
    cluster = ToyCluster(engines, shards, relays=relays, plan=transfers(shards, FINE))
    require_same(cluster, cluster.train())
    sent = sum(cluster.nodes[1 + s].sent_bytes for s in range(shards))
    assert sent == STEPS * cluster.plan.weight_bytes  # whatever the number of engines and relays
    taken = sum(cluster.network.taken_bytes[1 + s] for s in range(shards))
    assert taken >= STEPS * cluster.plan.gradient_bytes


@pytest.mark.parametrize(
    ("engines", "shards", "relays"), [(3, 1, 3), (4, 2, 7), (5, 2, 6), (6, 1, 12), (8, 3, 14)]
)
def test_trees_of_relays_do_not_change_bits(deep_trees, engines, shards, relays):
    cluster = ToyCluster(engines, shards, relays=relays, plan=transfers(shards, FINE))
    require_same(cluster, cluster.train())


@pytest.mark.parametrize(("engines", "relays"), [(2, 1), (4, 5), (8, 14)])
def test_engine_link_carries_its_own_weights_and_gradients_only(deep_trees, engines, relays):
    cluster = ToyCluster(engines, 2, relays=relays, plan=transfers(2, FINE))
    require_same(cluster, cluster.train())
    network, plan = cluster.network, cluster.plan
    rows = STEPS * 17 * 4 * MICRO_BATCHES // engines
    for number in range(FIRST_ENGINE, FIRST_ENGINE + engines):
        # Its micro-batches are a whole subtree, so one sum leaves it.
        assert network.sent_bytes[number] == STEPS * plan.gradient_bytes
        assert network.taken_bytes[number] == STEPS * plan.weight_bytes + rows
    taken = sum(network.taken_bytes[1 + shard] for shard in range(2))
    assert taken == STEPS * plan.gradient_bytes


@pytest.mark.parametrize(
    ("engines", "shards", "relays"), [(1, 1, 1), (3, 2, 2), (4, 2, 8), (8, 1, 7)]
)
def test_connections_are_those_that_memory_budget_counts(deep_trees, engines, shards, relays):
    cluster = ToyCluster(engines, shards, relays=relays, plan=transfers(shards, FINE))
    gone, send = set(), cluster.network.send

    def place(number: int) -> int:
        if number >= FIRST_RELAY:
            return engines + number - FIRST_RELAY
        return number - FIRST_ENGINE if number >= FIRST_ENGINE else -number

    def note(sender: int, to: int, message: Message) -> None:
        if message.kind in (MessageType.WEIGHTS, MessageType.GRADIENT):
            gone.add((place(sender), place(to)))
        send(sender, to, message)

    cluster.network.send = note
    cluster.train(2)
    assert gone == connections(engines, shards, relays)


QUICK = (10, 115, 143, 199, 283)


@pytest.mark.parametrize("verb", ["kill", "stop"])
@pytest.mark.parametrize(
    "point",
    [
        *quick_first(sorted({*range(3, 400, 14), *QUICK}), QUICK),
        *(pytest.param(p, marks=pytest.mark.slow) for p in range(10, 400, 14) if p not in QUICK),
    ],
)
def test_relay_lost_between_any_two_messages_changes_no_bit(deep_trees, verb, point):
    cluster = ToyCluster(4, 2, relays=3, plan=transfers(2, FINE))
    cluster.strike_at(point, f"{verb} {FIRST_RELAY + point % 3}")
    require_same(cluster, cluster.train())
    assert "relay lost" in kinds(cluster)
    assert "engine lost" not in kinds(cluster)


def test_lost_relay_is_replaced():
    cluster = ToyCluster(3, 1, relays=2)
    first = cluster.train(1)
    cluster.network.kill(FIRST_RELAY)
    cluster.network.after(0.1, cluster.join_relay)
    cluster.network.run(lambda: kinds(cluster).count("relay joined") == 3, 10.0)
    require_same(cluster, [*first, *cluster.train(STEPS, 2)])
    assert cluster.coordinator._epochs.view.relays == (FIRST_RELAY + 1, FIRST_RELAY + 2)


def test_step_is_made_without_relays_when_all_are_lost():
    cluster = ToyCluster(3, 1, relays=2)
    for relay in (0, 1):
        cluster.network.kill(FIRST_RELAY + relay)
    require_same(cluster, cluster.train())
    assert kinds(cluster).count("relay lost") == 2
    assert cluster.coordinator._epochs.view.relays == ()


def test_relays_that_come_later_take_part_from_the_next_step_on():
    cluster = ToyCluster(3, 2)
    first = cluster.train(1)
    cluster.coordinator.wanted_relays = 3
    for _ in range(4):
        cluster.join_relay()
    require_same(cluster, [*first, *cluster.train(STEPS, 2)])
    assert cluster.coordinator._epochs.view.relays == tuple(range(FIRST_RELAY, FIRST_RELAY + 3))


@pytest.mark.parametrize("ends", [(1, FIRST_RELAY), (FIRST_ENGINE, FIRST_RELAY)])
def test_cut_link_of_a_relay_changes_no_bit(ends):
    faults = Faults(0, Rates(), {ends: (0.0, 1000.0)})
    cluster = ToyCluster(3, 2, faults, relays=2, plan=transfers(2, FINE))
    require_same(cluster, cluster.train())
    assert "relay lost" in kinds(cluster)  # nobody else is behind the broken link
    assert cluster.network.now < 30


def test_failed_relay_is_evicted_and_the_step_repeated():
    cluster, failed = ToyCluster(3, 1, relays=2), []
    send = cluster.network.send

    def fail(sender: int, to: int, message: Message) -> None:
        if sender == FIRST_RELAY and message.kind is MessageType.GRADIENT and not failed:
            failed.append(sender)
            body = {"error": "MemoryError", "text": "no memory"}
            fields = {"epoch": message.epoch, "sender": sender, "step": message.step}
            message, to = Message(MessageType.FAILURE, body=body, **fields), 0
        send(sender, to, message)

    cluster.network.send = fail
    require_same(cluster, cluster.train())
    [event] = [event for event in cluster.happened if event.kind == "relay lost"]
    assert event.text == f"relay {FIRST_RELAY}: it failed: MemoryError: no memory"


def begins_with_rows(cluster: ToyCluster) -> list[tuple[int, bool]]:
    """By BEGIN of an engine: its step, and whether it carries rows; filled while it trains."""
    begun, send = [], cluster.network.send

    def note(sender: int, to: int, message: Message) -> None:
        if message.kind is MessageType.BEGIN and FIRST_ENGINE <= to < FIRST_RELAY:
            begun.append((message.step, bool(message.size)))
        send(sender, to, message)

    cluster.network.send = note
    return begun


@pytest.mark.parametrize("relays", [0, 2])
def test_rows_are_sent_a_step_ahead(relays):
    cluster = ToyCluster(3, 2, relays=relays, sends_ahead=True)
    begun = begins_with_rows(cluster)
    require_same(cluster, cluster.train())
    assert begun == [(1, True)] * 3 + [(2, False)] * 3 + [(3, False)] * 3


def test_rows_are_sent_again_in_another_epoch():
    cluster = ToyCluster(3, 2, sends_ahead=True)
    begun = begins_with_rows(cluster)
    cluster.watch = lambda: cluster.coordinator._step == 2 and cluster.network.kill(FIRST_ENGINE)
    require_same(cluster, cluster.train())
    assert (2, True) in begun


def test_lost_rows_repeat_the_step():
    cluster, lost = ToyCluster(3, 2, sends_ahead=True), []
    send = cluster.network.send

    def lose(sender: int, to: int, message: Message) -> None:
        if message.kind is MessageType.ROWS and not lost:
            lost.append(to)
        else:
            send(sender, to, message)

    cluster.network.send = lose
    require_same(cluster, cluster.train())
    assert kinds(cluster).count("retry") == 1


@pytest.mark.parametrize("hundred", quick_first(range(5), [0]))
def test_faults_do_not_change_result(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        survive(seed, with_relays=True)


@pytest.mark.parametrize("hundred", quick_first(range(5), []))
def test_faults_do_not_change_result_with_trees_of_relays(deep_trees, hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        survive(seed, with_relays=True)


@pytest.mark.slow
@pytest.mark.parametrize("thousand", range(1, 21))
def test_faults_do_not_change_result_long(thousand):
    for seed in range(1000 * thousand, 1000 * thousand + 1000):
        survive(seed, with_relays=True)
