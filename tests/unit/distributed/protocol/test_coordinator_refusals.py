"""The coordinator alone: what makes no sense costs its sender the place, and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
from any_message import messages
from coordinator_play import ENGINES, SHARDS, Play
from hypothesis import given, settings, strategies as st

from penstock.distributed.protocol import (
    RolledBackError,
    UnrecoverableError,
)
from penstock.distributed.protocol.messages import MessageType
from penstock.errors import PenstockError


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"losses": 3},
        {"losses": ["0x1p0"]},
        {"losses": [1.0, 1.0]},
        {"losses": ["one", "two"]},
    ],
)
def test_invalid_losses_evict_engine(body):
    play = Play()
    play.start(2)
    play.say(100, MessageType.LOSSES, body=body)
    assert play.coordinator.ready == (101, 102)
    assert "node 100 sent a LOSSES message that has" in play.happened[-1].text
    play.see()
    play.finish()
    assert play.ended.pop().error is None


@pytest.mark.parametrize("steps", [None, "all", [1, "two"], {"1": 2}])
def test_invalid_held_steps_evict_shard(steps):
    play = Play(agreed=False)
    play.start(2)
    play.see()
    play.say(1, MessageType.HELD_STEPS, step=0, body={"steps": steps})
    assert isinstance(play.ended[-1].error, UnrecoverableError)
    assert play.happened[-1].kind == "shard lost"
    assert "node 1 sent a HELD_STEPS message that has" in play.happened[-1].text


@pytest.mark.parametrize("kind", [MessageType.PREPARED, MessageType.COMMITTED])
def test_invalid_report_or_acknowledgement_evicts_shard(kind):
    play = Play()
    play.start(2)
    if kind is MessageType.COMMITTED:
        play.work()
    play.say(1, kind, body={"shard": "one"})
    assert isinstance(play.ended[-1].error, UnrecoverableError)
    assert f"node 1 sent a {kind.name} message" in play.happened[-1].text


@pytest.mark.parametrize("key", ["progress", "received"])
@pytest.mark.parametrize("value", ["far", -1, None, 0.5])
def test_invalid_heartbeat_evicts_engine(key, value):
    play, body = Play(), {"progress": 0, "received": 0, key: value}
    play.start(2)
    play.say(101, MessageType.HEARTBEAT, epoch=0, body=body)
    assert play.coordinator.ready == (100, 102)
    play.say(999, MessageType.HEARTBEAT, epoch=0, body=body)  # of one who is nobody
    assert play.coordinator.ready == (100, 102)


def report(play: Play, receiver: int, sender: int) -> None:
    """Let a node report an invalid message, and the step be retried if it is."""
    text = f"node {sender} sent a GRADIENT message"
    body = {"error": "ProtocolError", "text": text, "about": sender}
    play.say(receiver, MessageType.FAILURE, body=body)
    play.see()
    play.begun()


@pytest.mark.parametrize("second", [101, 2])
def test_sender_that_two_nodes_report_is_evicted(second):
    play = Play()
    play.start(2)
    report(play, 100, 102)
    assert {*play.coordinator.ready} == {*ENGINES}
    assert play.happened[-1].kind == "retry"
    report(play, second, 102)
    assert {*play.coordinator.ready} == {100, 101}
    play.finish()
    assert play.ended[-1].error is None


@pytest.mark.parametrize("receiver", [100, 2])
def test_reports_of_one_node_about_one_sender_count_once(receiver):
    """The step is retried in another order, so that the defective one of them meets others."""
    play = Play()
    play.start(2)
    orders = {play.coordinator.engines}
    for _ in range(3):
        report(play, receiver, 102)
        orders.add(play.coordinator.engines)
    assert {*play.coordinator.ready} == {*ENGINES}
    assert len(orders) == 3
    play.finish()
    assert play.ended[-1].error is None


def test_one_of_two_nodes_that_exchange_only_invalid_messages_is_evicted():
    """A replica's loss costs more than an engine's; of two engines the sender goes."""
    for receiver, sender, evicted in ((100, 101, 101), (100, 1, 100), (5, 100, 100), (5, 1, 1)):
        play = Play(shards=((1, 5), (2, 6)))
        play.start(2)
        for _ in range(4):
            assert evicted in play.coordinator.membership
            report(play, receiver, sender)
        assert {*play.coordinator.membership.all} == {1, 5, 2, 6, *ENGINES} - {evicted}
        play.finish()
        assert play.ended[-1].error is None


@pytest.mark.parametrize("receiver", [100, 5])
def test_node_that_reports_two_senders_is_evicted(receiver):
    play = Play(shards=((1, 5), (2, 6)))
    play.start(2)
    report(play, receiver, 101)
    assert receiver in play.coordinator.membership
    report(play, receiver, 102)
    assert receiver not in play.coordinator.membership
    assert {101, 102} <= {*play.coordinator.ready}
    play.finish()
    assert play.ended[-1].error is None


def test_node_that_reported_a_lost_sender_alone_is_evicted_with_its_next_report():
    play = Play(shards=((1, 5), (2, 6)))
    play.start(2)
    for sender in (101, 101, 101, 101, 102):
        report(play, 5, sender)
    assert {*play.coordinator.ready} == {100, 102}
    assert 5 not in play.coordinator.membership


def test_node_whose_report_another_has_confirmed_is_not_accused():
    play = Play(shards=((1, 5), (2, 6)))
    play.start(2)
    for receiver, sender in ((5, 101), (1, 101), (5, 102)):
        report(play, receiver, sender)
    assert {*play.coordinator.ready} == {100, 102}
    assert 5 in play.coordinator.membership


def test_receivers_go_for_the_last_replica_of_a_shard_until_the_error_is_the_same():
    """The replica may hold the only copy of the state, so it is never evicted for messages."""
    play = Play()
    play.start(2)
    for _ in range(4):
        report(play, 100, 1)
    assert {*play.coordinator.ready} == {101, 102}
    for _ in range(4):
        report(play, 101, 1)
    assert isinstance(play.ended[-1].error, UnrecoverableError)
    assert "engines 100 and 101 failed with the same error" in str(play.ended[-1].error)
    assert 1 in play.coordinator.membership


def test_report_about_another_node_does_not_end_a_decided_step():
    play = Play()
    play.start(2)
    play.begun()
    play.work()
    for _ in range(2):
        report(play, 1, 100)
    assert play.coordinator.ready == ENGINES
    play.finish()
    assert play.ended[-1].error is None


def test_failure_of_node_outside_view_is_ignored():
    play = Play(wanted=2)
    play.start(2)
    for sender in (102, 999):
        play.say(sender, MessageType.FAILURE, body={"error": "ValueError", "text": "no"})
    assert not play.ended
    assert play.coordinator.ready == ENGINES


@settings(max_examples=60, deadline=None)
@given(st.lists(messages([0, *SHARDS, *ENGINES, 7]), max_size=6), st.integers(0, 3))
def test_random_messages_do_not_raise_in_coordinator(received, phase):
    play = Play(agreed=False)
    play.start(1)
    for advance in (play.see, play.agree, play.work)[:phase]:
        advance()
    for message in received:
        epoch, step = play.coordinator.epoch, play.coordinator._step
        play.coordinator.handle(message)
        play.coordinator.handle(dataclasses.replace(message, epoch=epoch, step=step))
        play.now += 0.1
        play.coordinator.tick(play.now)
    for outcome in play.ended:
        assert outcome.error is None or isinstance(
            outcome.error, (UnrecoverableError, RolledBackError, PenstockError)
        )
