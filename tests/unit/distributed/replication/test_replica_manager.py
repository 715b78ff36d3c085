"""Shards with replicas as the trainer's process sees them: losses, places, stops."""

from __future__ import annotations

import pytest
import torch
from replicated_run import PROGRAM, trained
from sharded_stores import assert_same_state
from store_programs import (
    forward_sweep,
    train,
)

from penstock.config import Config
from penstock.distributed.control_messages import ReplicaSlot
from penstock.errors import ConfigError, StorageError


def test_reads_and_writes_continue_on_remaining_replica(run):
    trained(run)
    name = "block.0.weight"
    expected = run.stores[1].master(name)
    run.calls.before[1, "read", 1] = lambda: run.lose(1)
    assert torch.equal(run.shard.master(name), expected)
    assert run.calls.came[2, "read"] == 1
    run.shard.remember({"best": 4})
    run.shard.discard()
    assert run.calls.came[2, "remember"] == run.calls.came[2, "discard"] == 1


def test_empty_replica_receives_copy_at_open(
    on_flash,
):
    run = trained(on_flash)
    run.stores[2].close()
    run.stores[2] = run.make(5, 1)  # its folder was deleted
    run.shard.open()
    assert_same_state(run.stores[2], run.stores[1])


def test_sizes_and_traffic_include_all_replicas(run):
    trained(run)
    assert run.shard.memory_bytes == {k: 2 * v for k, v in run.stores[1].memory_bytes.items()}
    assert run.shard.flash_bytes == 2 * run.stores[1].flash_bytes
    run.shard.take_traffic()
    forward_sweep(run.stores[1])
    train(run.stores[2], 1, seed=1)
    taken = run.shard.take_traffic()
    trained_bytes = 4 * sum(
        PROGRAM.weights[name].elements
        for stage in PROGRAM.stages
        for name in stage.weights
        if PROGRAM.weights[name].trainable
    )
    assert taken.gradient_bytes == trained_bytes
    assert taken.streamed_bytes >= sum(map(PROGRAM.stage_stream_bytes, PROGRAM.stages))


def test_loss_of_last_replica_in_memory_ends_run(in_memory):
    run = trained(in_memory)
    run.lose(1)
    assert not run.failed
    run.lose(2)
    with pytest.raises(StorageError, match=r"shard 0 of the store was lost, .* the last checkpoi"):
        run.shard.take_traffic()


def test_stop_ends_wait_for_lost_shard_on_flash(on_flash):
    run = trained(on_flash)
    run.lose(1)
    run.lose(2)
    run.is_stopped = True
    with pytest.raises(StorageError, match="stopped while a shard of the store was lost; give the"):
        run.shard.remember({})
    assert not run.failed


def test_slot_lost_last_is_taken_first(on_flash):
    run = trained(on_flash)
    run.lose(2)
    run.lose(1)
    assignment = run.apart.assignment
    assert assignment.is_incomplete
    assert assignment.free([]) == [ReplicaSlot(0, 0)]  # what replica 1 has stored may be old
    assert assignment.free([ReplicaSlot(0, 0)]) == []
    assignment.take(ReplicaSlot(0, 0), 7)
    assert assignment.free([]) == [ReplicaSlot(0, 1)]
    assert not assignment.is_incomplete
    assert assignment.is_replaced(1)


def test_replicas_share_host_only_when_no_other_is_expected(in_memory):
    assignment = in_memory.apart.assignment
    assignment.lose(2)
    here = [(ReplicaSlot(0, 0), "host-1")]
    in_memory.coordinator.lost_nodes.clear()

    def slot_for(host, others_expected, asked=None):
        return in_memory.apart.slot_for(None, asked, host, here, others_expected)

    assert slot_for("host-2", True) == ReplicaSlot(0, 1)
    assert slot_for("host-1", True) is None  # an engine then, and another takes the place
    assert slot_for("host-1", False) == ReplicaSlot(0, 1)
    assert slot_for("host-1", True, asked=0) == ReplicaSlot(0, 1)
    assert slot_for("host-1", True, asked=1) is None


@pytest.mark.parametrize("replicas", [0, 3, 1.5, "two"])
def test_replicas_must_be_one_or_two(replicas):
    with pytest.raises(ConfigError, match=r"store\.replicas"):
        Config.from_mapping(
            {
                "model": "gpt2",
                "cluster": {"start": "local", "shards": "apart"},
                "store": {"replicas": replicas},
            }
        )


@pytest.mark.parametrize("cluster", [{}, {"start": "local"}])
def test_replica_in_same_process_is_refused(cluster):
    told = r"store\.replicas: expected 1 with cluster\.shards: here, got 2; .* to apart"
    with pytest.raises(ConfigError, match=told):
        Config.from_mapping({"model": "gpt2", "cluster": cluster, "store": {"replicas": 2}})


def test_replicas_on_flash_require_two_durable_steps():
    store = {"replicas": 2, "flash": {"path": "x", "keep_steps": 1}}
    cluster = {"start": "local", "shards": "apart"}
    with pytest.raises(ConfigError, match=r"2 or more with store\.replicas above 1, got 1"):
        Config.from_mapping({"model": "gpt2", "cluster": cluster, "store": store})
