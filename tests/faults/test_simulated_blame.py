"""Which node goes when the messages between two nodes are invalid or damaged, in simulated runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from toy_cluster import FIRST_ENGINE, ToyCluster
from toy_model import STEPS, reference

from penstock.distributed.protocol.messages import Message, MessageType

LOSSES, WEIGHTS = reference()


def change(
    cluster: ToyCluster,
    is_changed: Callable[[int, int, Message], bool],
    result: Callable[[Message], object],
) -> None:
    """Have the network deliver the result of every message that is chosen by sender and receiver"""
    carry = cluster.network._faults.carry

    def carried(now, sender, to, message):
        if is_changed(sender, to, message):
            return [(0.0, result(message))]
        return carry(now, sender, to, message)

    cluster.network._faults.carry = carried


def impossible(message: Message) -> Message:
    """Return a message that names a chunk that does not exist."""
    return dataclasses.replace(message, chunk=999)


def lost(cluster: ToyCluster) -> list[int | None]:
    return [happened.node for happened in cluster.happened if happened.kind.endswith(" lost")]


def require_same(cluster: ToyCluster) -> None:
    outcomes = cluster.train()
    assert [list(outcome.losses) for outcome in outcomes] == LOSSES
    for made, wanted in zip(cluster.weights(), WEIGHTS, strict=True):
        np.testing.assert_array_equal(made, wanted)
    assert all(shard.step == STEPS for shard in cluster.shards)


def test_replica_with_invalid_weights_is_evicted_and_no_engine():
    """It streams first, and again after a damaged frame of the other replica."""
    cluster, flipped = ToyCluster(2, 1, replicas=2, on_flash=False), []
    change(cluster, lambda sender, to, m: (sender, m.kind) == (1, MessageType.WEIGHTS), impossible)

    def is_flipped(sender: int, to: int, message: Message) -> bool:
        if flipped or (sender, message.kind, message.step) != (2, MessageType.WEIGHTS, 2):
            return False
        flipped.append(message)
        return True

    change(cluster, is_flipped, cluster.network._faults._flip)
    require_same(cluster)
    assert lost(cluster) == [1]


def test_replica_that_finds_messages_of_all_engines_invalid_is_evicted_and_no_engine():
    cluster = ToyCluster(3, 1, replicas=2, on_flash=False)
    change(cluster, lambda sender, to, m: (to, m.kind) == (2, MessageType.GRADIENT), impossible)
    require_same(cluster)
    assert lost(cluster) == [2]


def test_engine_that_finds_messages_of_several_replicas_invalid_is_evicted():
    cluster = ToyCluster(2, 2, replicas=2, on_flash=False)
    change(
        cluster,
        lambda sender, to, m: (to, m.kind) == (FIRST_ENGINE, MessageType.WEIGHTS),
        impossible,
    )
    require_same(cluster)
    assert lost(cluster) == [FIRST_ENGINE]


def test_engine_with_invalid_gradients_is_evicted():
    """By the reports of both replicas."""
    cluster = ToyCluster(1, 1, replicas=2, on_flash=False)
    change(
        cluster,
        lambda sender, to, m: (sender, m.kind) == (FIRST_ENGINE, MessageType.GRADIENT),
        impossible,
    )
    require_same(cluster)
    assert lost(cluster) == [FIRST_ENGINE]


def test_replica_that_receives_damaged_frames_of_every_engine_is_evicted():
    """The only engine goes first: of one connection alone nobody knows which end is defective."""
    cluster = ToyCluster(1, 1, replicas=2, on_flash=False)
    flip = cluster.network._faults._flip
    change(cluster, lambda sender, to, m: (to, m.kind) == (2, MessageType.GRADIENT), flip)
    require_same(cluster)
    assert lost(cluster) == [FIRST_ENGINE, 2]
