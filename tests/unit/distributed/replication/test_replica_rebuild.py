"""A learner is given a copy of a shard, straight from the other node: every bit, or nothing."""

from __future__ import annotations

import time

import numpy as np
import pytest
from replicated_run import trained
from sharded_stores import assert_same_state
from store_programs import (
    train,
)

from penstock.distributed.control_messages import ReplicaSlot
from penstock.distributed.protocol.messages import Message, MessageType
from penstock.distributed.replication import state_transfer
from penstock.distributed.rpc.rpc import InvalidResponseError, RpcMessage
from penstock.errors import ClusterError, CorruptionError, StorageError
from penstock.store.flash.shards import durable_records


def test_learner_receives_exact_copy(run):
    trained(run)
    assert_same_state(run.stores[1], run.stores[2])
    run.lose(1)
    run.come(3, 0)
    run.copy()
    assert run.nodes == (2, 3)
    assert_same_state(run.stores[3], run.stores[2])
    ((kind, text),) = run.said
    assert kind == "replica copied"
    assert "shard 0: node 3 received" in text
    for store in (run.stores[2], run.stores[3]):
        train(store, 2, seed=5)
    assert_same_state(run.stores[3], run.stores[2])


def test_learner_on_flash_holds_step_durably(on_flash):
    run = trained(on_flash)
    run.shard.remember({"best": 3})
    run.lose(1)
    run.come(3, 0)
    run.copy(run.shard)
    assert run.stores[3].durable_steps == [2]
    assert run.stores[3].extra == run.stores[2].extra == {"best": 3}
    assert run.stores[2].durable_step == 2  # the same, before it is copied
    for store in (run.stores[2], run.stores[3]):
        train(store, 1, seed=5)
        store.make_durable()
    # So that a run that opens both again sees by these checksums that they are the same.
    ours, theirs = (durable_records(run.stores[node].folder) for node in (2, 3))
    assert [record.blob for record in ours] == [record.blob for record in theirs]


@pytest.mark.parametrize(
    ("what", "times"),
    [
        ("take_copy", 1),
        ("SNAPSHOT_CHUNK", 1),
        ("SNAPSHOT_CHUNK", 5),
        ("checksum", 1),
        ("finish_restore", 1),
    ],
)
def test_learner_lost_during_copy_is_replaced(run, what, times):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    run.calls.before[3, what, times] = lambda: run.lose(3)
    run.copy()
    assert run.nodes == (2,)
    run.come(5, 0)
    run.copy()
    assert run.nodes == (2, 5)
    assert_same_state(run.stores[5], run.stores[2])
    assert not run.failed


def test_source_lost_during_copy_on_flash_restarts_copy(on_flash):
    run = trained(on_flash)
    run.lose(1)
    run.come(3, 0)
    run.calls.before[2, "SNAPSHOT_REQUEST", 4] = lambda: run.lose(2)
    run.copy()
    assert run.nodes == ()
    run.copy()  # nobody is there
    run.stores[4] = run.stores[2]
    # Another process has opened the stored state of the lost node.
    run.apart.assignment.take(ReplicaSlot(0, 1), 4)
    run.copy()
    assert run.nodes == (4, 3)
    assert_same_state(run.stores[3], run.stores[4])


def test_source_lost_during_copy_in_memory_ends_run(in_memory):
    run = trained(in_memory)
    run.lose(1)
    run.come(3, 0)
    run.calls.before[2, "SNAPSHOT_REQUEST", 4] = lambda: run.lose(2)
    run.copy()
    assert run.nodes == ()
    with pytest.raises(StorageError, match="resumes from the last checkpoint"):
        run.shard.take_traffic()


def test_learner_that_cannot_store_copy_is_refused(run, monkeypatch):
    trained(run)
    run.lose(1)
    run.come(3, 0)

    def full(number, data):
        raise StorageError("no space left on node 3")

    with_changed_portions(run.stores[3], monkeypatch, write=full)
    run.copy()
    assert run.nodes == (2,)
    assert run.said == [
        (
            "replica refused",
            "shard 0 continues without node 3 as a replica: no space left on node 3",
        )
    ]
    assert run.coordinator.lost_nodes == [1, 3]
    run.apart.lost(ReplicaSlot(0, 0), 3)  # as its link ends
    assert not run.apart.assignment.free([])
    assert run.apart.assignment.retired == 1


def test_user_is_asked_for_workers_of_vacant_slots_only(in_memory):
    """A worker in the place of a learner that could not store its copy would be refused."""
    run = trained(in_memory)
    cluster = run.apart._config.cluster.model_copy(update={"start": "listen"})
    run.apart._config = run.apart._config.model_copy(update={"cluster": cluster})
    run.lose(1)
    assert [kind for kind, _ in run.said] == ["shard wanted"]
    run.come(3, 0)
    run.apart._refuse(0, 3, "no space left on node 3")
    run.apart.lost(ReplicaSlot(0, 0), 3)  # as its link ends
    assert [kind for kind, _ in run.said] == ["shard wanted", "replica refused"]


def test_stop_cancels_copy(run):
    trained(run)
    run.lose(2)
    run.come(3, 1)
    run.calls.before[3, "SNAPSHOT_CHUNK", 2] = lambda: setattr(run, "is_stopped", True)
    with pytest.raises(InterruptedError, match="stopped while a shard of the store was copied"):
        run.copy()
    assert run.nodes == (1,)
    asked = run.calls.came[1, "SNAPSHOT_REQUEST"]
    while run.calls.todo:  # what was on its way comes, and nobody asks for more
        run.calls.todo.popleft()()
    assert run.calls.came[1, "SNAPSHOT_REQUEST"] <= asked + state_transfer.WINDOW
    assert run.calls.came[3, "give_up_copy"] == 1
    assert run.shard.content_hash() == run.stores[1].content_hash()


def with_changed_portions(store, monkeypatch, **changed) -> None:
    """Let the portions of a store do something else for these methods."""
    made = store.portions

    def portions(portion_bytes):
        found = made(portion_bytes)
        for name, change in changed.items():
            monkeypatch.setattr(found, name, change)
        return found

    monkeypatch.setattr(store, "portions", portions)


def test_copy_bypasses_trainer_within_window(run):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    before = run.calls.called_with_arrays
    run.copy()
    assert run.nodes == (2, 3)
    assert run.calls.called_with_arrays == before
    assert not [key for key in run.calls.came if key[1] in ("read",)]
    assert (
        run.calls.came[2, "SNAPSHOT_REQUEST"] > 3 * state_transfer.WINDOW
    )  # so that this says something
    assert run.calls.most_waiting <= state_transfer.WINDOW


def test_changed_portion_restarts_copy(run, monkeypatch):
    """Whatever the links say: the checksums of all that both hold are what counts."""
    trained(run)
    run.lose(1)
    run.come(3, 0)
    store, flips = run.stores[3], [1]
    made = store.portions

    def portions(portion_bytes):
        found = made(portion_bytes)
        write = found.write

        def flipping(number, data):
            changed = np.array(data)
            if flips and number == 7:
                changed[flips.pop()] ^= 4
            write(number, changed)

        monkeypatch.setattr(found, "write", flipping)
        return found

    monkeypatch.setattr(store, "portions", portions)
    run.copy()
    assert run.nodes == (2, 3)
    assert_same_state(run.stores[3], run.stores[2])
    again, copied = run.said
    assert again[0] == "replica copied again"
    assert "the copy on node 3 has checksum" in again[1]
    assert copied[0] == "replica copied"


def test_repeatedly_failed_copy_refuses_learner(run):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    taker = run.calls.of(3)[1]
    for count in (3, 6, 9):
        run.calls.before[3, "SNAPSHOT_CHUNK", count] = lambda: taker.connection_ended(
            2, "a cable was cut"
        )
    run.copy()
    assert run.nodes == (2,)
    assert [kind for kind, _ in run.said] == [*["replica copied again"] * 2, "replica refused"]
    assert "3 copies in a row failed; the last error: from node 2 to node 3: the" in run.said[2][1]
    assert not run.failed


def test_unrelated_connection_or_late_portion_does_not_fail_copy(run):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    taker = run.calls.of(3)[1]
    stale = Message(MessageType.SNAPSHOT_CHUNK, 0, 2, op=0, index=77)
    run.calls.before[3, "SNAPSHOT_CHUNK", 3] = lambda: (
        taker.connection_ended(9, "gone"),
        taker.take(stale),
    )
    run.copy()
    assert run.nodes == (2, 3)
    assert [kind for kind, _ in run.said] == ["replica copied"]


def test_silent_copy_is_restarted(run):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    taker = run.calls.of(3)[1]
    late = time.monotonic() + state_transfer.SILENCE
    run.calls.before[3, "SNAPSHOT_CHUNK", 2] = lambda: (
        taker.tick(late - 30),
        taker.tick(late + 30),
    )
    run.copy()
    assert run.nodes == (2, 3)
    assert "node 2 to node 3: no data arrived for 60 s" in run.said[0][1]
    assert_same_state(run.stores[3], run.stores[2])


def test_read_error_of_source_ends_copy(run, monkeypatch):
    trained(run)
    run.lose(1)
    run.come(3, 0)

    def damaged(number):
        raise CorruptionError("extents: damaged in bytes 0 to 9")

    with_changed_portions(run.stores[2], monkeypatch, read=damaged)
    with pytest.raises(CorruptionError, match=r"node 2: extents: damaged in bytes 0 to 9"):
        run.copy()
    assert run.nodes == (2,)


def test_source_that_changes_step_ends_copy(run):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    run.calls.before[2, "SNAPSHOT_REQUEST", 6] = lambda: train(run.stores[2], 1, seed=8)
    with pytest.raises(ClusterError, match="node 2: its step changed from 2 to 3 during the"):
        run.copy()
    assert run.nodes == (2,)


@pytest.mark.parametrize(
    ("node", "method", "says"),
    [
        (2, "status", {"step": "two"}),
        (2, "checksum", {}),
        (3, "checksum", {"checksum": 7}),
        (3, "take_copy", {"copied": True}),
    ],
)
def test_invalid_response_during_copy_evicts_node(in_memory, node, method, says):
    run = trained(in_memory)
    run.lose(1)
    run.come(3, 0)
    run.calls.says[node, method] = RpcMessage(says)
    run.copy()
    assert run.nodes == (2,)  # until it is lost, if it is that
    assert run.coordinator.lost_nodes == [1, node]


@pytest.mark.parametrize("error", [ClusterError, InvalidResponseError])
@pytest.mark.parametrize("method", ["take_copy", "checksum", "remember", "finish_restore"])
def test_error_of_learner_costs_the_learner_and_not_the_source(run, monkeypatch, method, error):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    begin = run.calls.begin

    def begin_or_fail(node, called, *arguments):
        call = begin(node, called, *arguments)
        if (node, called) == (3, method):
            call.answer = failing
        return call

    def failing(meanwhile):
        raise error("node 3 replied with nonsense")

    monkeypatch.setattr(run.calls, "begin", begin_or_fail)
    run.copy()
    assert run.nodes == (2,)
    assert run.coordinator.lost_nodes == [1, 3]
    [(kind, text)] = run.said
    assert (kind, "node 3 replied with nonsense" in text) == ("replica refused", True)


def test_error_that_ends_the_run_during_copy_is_not_that_of_the_learner(run):
    trained(run)
    run.lose(1)
    run.come(3, 0)
    fail = run.event_queue.fail
    run.calls.before[3, "SNAPSHOT_CHUNK", 2] = lambda: fail(StorageError("the run has ended"))
    with pytest.raises(StorageError, match="the run has ended"):
        run.copy()
    assert not [kind for kind, _ in run.said if kind == "replica refused"]


@pytest.mark.parametrize(
    "given", [None, {}, {"source": 2, "step": 1}, {"source": 2, "step": 1, "listens": ["h", 0]}]
)
def test_copy_with_invalid_source_is_refused(in_memory, given):
    taker = in_memory.calls.of(2)[1]
    with pytest.raises(ClusterError, match="expected the source, step and address of a copy"):
        taker.begin(1, given)


def test_no_copy_without_learner_or_agreed_step(run):
    trained(run)
    run.copy()
    run.lose(1)
    run.come(3, 0)
    run.coordinator.is_agreed = False
    run.copy()
    assert run.nodes == (2,)
    assert not run.said
