"""The coordinator alone, where every shard has two nodes: 1 and 3, 2 and 4."""

from __future__ import annotations

import numpy as np
import pytest
from coordinator_play import ENGINES, Play

from penstock.distributed.protocol import UnrecoverableError
from penstock.distributed.protocol.membership_view import MembershipView
from penstock.distributed.protocol.messages import MessageType
from penstock.errors import CorruptionError, ProtocolError

SHARDS = ((1, 3), (2, 4))


def two(**changes) -> Play:
    return Play(shards=SHARDS, **changes)


def told(play: Play, kind: str) -> list[str]:
    return [happened.text for happened in play.happened if happened.kind == kind]


def test_all_replicas_execute_step():
    play = two()
    play.start(2)
    assert sorted(play.begun()) == [1, 2, 3, 4, *ENGINES]
    for engine in ENGINES:
        play.lose(engine)
    for node in (1, 2, 3):
        play.say(node, MessageType.PREPARED)
    assert not play.take(MessageType.COMMIT)
    play.say(4, MessageType.PREPARED)
    assert sorted(to for to, _ in play.take(MessageType.COMMIT)) == [1, 2, 3, 4]
    for node in (4, 3, 2):
        play.say(node, MessageType.COMMITTED, body={"node": node})
    assert not play.ended
    play.say(1, MessageType.COMMITTED, body={"node": 1})
    assert play.ended[-1].answers == [{"node": 1}, {"node": 2}]  # one for each shard


def test_decision_uses_one_report_per_shard():
    play = two()
    order = play.start(2)
    heard: list[list] = []
    order.decide = lambda losses, prepared: heard.append(list(prepared)) or {}
    for engine in ENGINES:
        play.lose(engine)
    for node in (4, 3, 2, 1):
        play.say(node, MessageType.PREPARED, body={"sum": node % 2})
    assert heard == [[{"sum": 1}, {"sum": 0}]]


def test_different_replicas_end_run_before_commit():
    play = two()
    play.start(2)
    for engine in ENGINES:
        play.lose(engine)
    for node in (1, 2, 3, 4):
        play.say(node, MessageType.PREPARED, body={"sum": node == 4})
    assert not play.take(MessageType.COMMIT)
    error = play.ended[-1].error
    assert isinstance(error, CorruptionError)
    assert str(error).startswith("shard 1: the replicas on nodes 2 and 4 must be equal")


@pytest.mark.parametrize("node", [1, 4])
def test_replica_lost_between_steps_is_left_out(node):
    play = two()
    play.coordinator.lost(node, "killed")
    other = {1: 3, 4: 2}[node]
    text = play.happened[-1].text
    assert text.endswith(f"node {node}: killed; the shard continues on node {other}")
    play.start(2)
    play.see()
    assert sorted(play.begun()) == sorted({1, 2, 3, 4, *ENGINES} - {node})
    play.finish()
    assert play.ended[-1].error is None


def test_loss_of_streaming_replica_retries_step():
    play = two()
    play.start(2)
    play.begun()
    play.coordinator.lost(1, "killed")
    assert play.coordinator.holders == ((3,), (2, 4))
    assert 1 not in play.see()
    assert sorted(play.begun()) == [2, 3, 4, *ENGINES]
    assert not play.take(MessageType.HELD_STEPS), "nobody needs to go back"


def test_loss_of_other_replica_does_not_retry_step():
    play = two()
    play.start(2)
    play.begun()
    epoch = play.coordinator.epoch
    for engine in ENGINES:
        play.lose(engine)
    for node in (1, 2, 4):
        play.say(node, MessageType.PREPARED)
    play.coordinator.lost(3, "killed")
    assert play.coordinator.epoch == epoch
    assert sorted(to for to, _ in play.take(MessageType.COMMIT)) == [1, 2, 4]
    play.say(3, MessageType.PREPARED)  # a zombie
    play.say(3, MessageType.FAILURE, body={"error": "StorageError", "text": "disk full"})
    assert not play.ended


def credits(play) -> list[tuple[int, dict]]:
    return [(to, dict(message.body)) for to, message in play.take(MessageType.GRADIENT_CREDIT)]


def test_streaming_replica_receives_credit_of_the_slowest_other():
    play = Play(shards=((1, 3, 5), (2, 4, 6)))
    play.start(2)
    play.begun()
    for node, stored in ((3, 2), (1, 3), (5, 1), (5, 1), (4, 1)):
        play.say(node, MessageType.GRADIENT_CREDIT, body={"stored": stored})
    assert credits(play) == [
        (1, {"stored": 0}),
        (1, {"stored": 1}),
        (1, {"stored": 1}),
        (2, {"stored": 0}),
    ]
    play.coordinator.lost(5, "killed")
    assert credits(play) == [(1, {"stored": 2})]
    play.coordinator.lost(3, "killed")
    assert credits(play) == [(1, {})], "no other is left"


def test_second_stall_evicts_replica_that_has_stored_less():
    """The replica that streams waits for it, and so lacks gradients too."""
    play = two()
    play.start(2)
    play.begun()
    for _ in range(2):
        for node in (1, 2, 3, 4):
            body = {"stored": 1 if node == 3 else 5}
            play.say(node, MessageType.GRADIENT_CREDIT, body=body)
        play.pass_time(3.0)
        play.see()
        play.begun()
    assert [event.node for event in play.happened if "lost" in event.kind] == [3]


@pytest.mark.parametrize("node", [1, 2, 3, 4])
def test_decided_step_ends_with_remaining_replicas(node):
    play = two()
    play.start(2)
    play.begun()
    play.work()
    for other in {1, 2, 3, 4} - {node}:
        play.say(other, MessageType.COMMITTED)
    play.coordinator.lost(node, "killed")
    (outcome,) = play.ended
    assert outcome.error is None
    play.start(3)
    assert node not in play.see()  # in a new epoch
    assert play.begun()


def test_error_evicts_replica_and_error_of_last_ends_step():
    play = two()
    play.start(2)
    play.begun()
    play.say(3, MessageType.FAILURE, body={"error": "StorageError", "text": "disk full"})
    assert told(play, "replica lost") == [
        "shard 0: node 3: it reported an error: disk full; the shard continues on node 1"
    ]
    assert not play.ended
    play.say(1, MessageType.FAILURE, body={"error": "StorageError", "text": "disk full"})
    error = play.ended[-1].error
    assert isinstance(error, UnrecoverableError)
    assert (error.node, str(error)) == (1, "disk full")


def test_shard_is_lost_with_last_replica():
    play = two()
    play.start(2)
    play.begun()
    play.coordinator.lost(1, "killed")
    assert not play.ended
    play.coordinator.lost(3, "killed")
    assert play.ended[-1].error.node == 3
    play.take(MessageType.VIEW)
    play.start(2)
    assert not play.see()
    play.coordinator.shard_joined(0, 9)
    assert sorted(play.see()) == [2, 4, 9, *ENGINES]
    assert play.agree(([0, 1], [1], [1])) == [1, 1, 1]
    assert sorted(play.begun()) == [2, 4, 9, *ENGINES]


def test_rollback_evicts_replicas_without_common_step():
    play = two(agreed=False)
    play.start(6)
    play.see()
    held = dict(zip((1, 3, 2, 4), ([4, 5], [2, 3], [4], [5]), strict=True))
    for node, _ in play.take(MessageType.HELD_STEPS):
        play.say(node, MessageType.HELD_STEPS, step=0, body={"steps": held[node]})
    assert not play.take(MessageType.ROLLBACK)
    assert play.coordinator.holders == ((1,), (4,))
    text = told(play, "replica lost")[1]
    assert "node 2: it does not hold step 5, to which all shards roll back" in text
    play.see()
    assert play.agree(([4, 5], [5])) == [5, 5]
    assert sorted(play.begun()) == [1, 4, *ENGINES]


def test_promoted_learner_takes_part_without_rollback():
    play = two()
    play.coordinator.lost(1, "killed")
    play.coordinator.learner_joined(0, 9)
    play.start(2)
    assert 9 not in play.see()
    play.finish()
    assert play.coordinator.promote(9)
    assert play.coordinator.holders == ((3, 9), (2, 4))
    play.start(3)
    assert sorted(play.see()) == [2, 3, 4, 9, *ENGINES]
    assert not play.take(MessageType.HELD_STEPS)
    assert sorted(play.begun()) == [2, 3, 4, 9, *ENGINES]


def test_lost_learner_is_not_promoted():
    play = two()
    play.coordinator.learner_joined(0, 9)
    play.pass_time(1.4, silent=[9])
    assert not play.coordinator.learners
    assert not play.coordinator.promote(9)
    play.coordinator.learner_joined(0, 10)
    play.coordinator.lost(1, "killed")
    play.coordinator.lost(3, "killed")
    assert not play.coordinator.promote(10)
    assert not play.coordinator.promote(11)


def test_replica_without_gradients_is_evicted_instead_of_engine():
    play = two()
    play.start(2)
    play.begun()
    for _ in range(2):
        for engine in ENGINES:
            play.lose(engine)
        for node in (1, 2, 4):
            play.say(node, MessageType.PREPARED)
        play.pass_time(2.6)
        play.see()
        play.begun()
    assert told(play, "replica lost") == [
        "shard 0: node 3: the other replica of its shard has all gradients, it has not; "
        "the shard continues on node 1"
    ]
    assert play.coordinator.ready == ENGINES


def select(play: Play) -> None:
    """Let a step change masks in one round of histograms."""
    order = play.start(2)
    play.begun()
    rounds = [np.zeros(1, np.uint8)]
    order.open_selections = lambda: rounds[0] if rounds else None
    order.histograms = lambda message, shard: shard
    order.narrow = lambda histograms: rounds.clear()


@pytest.mark.parametrize("relays", [(), (500, 501)])
def test_replica_without_histograms_is_evicted_instead_of_engine(relays):
    play = two(relays=relays)
    select(play)
    for _ in range(2):
        play.work()
        assert len(play.take(MessageType.HISTOGRAM_REQUEST)) == 4
        for node in (1, 2, 3):
            play.say(node, MessageType.HISTOGRAM_REPLY, body={"round": 1})
        play.pass_time(2.6)
        play.see()
        play.begun()
    assert told(play, "replica lost") == [
        "shard 1: node 4: it has not answered with its histograms; the shard continues on node 2"
    ]
    assert play.coordinator.ready == ENGINES
    assert play.coordinator.membership.relays == relays


def test_last_replica_without_histograms_has_more_time():
    play = Play()
    select(play)
    for _ in range(6):
        play.work()
        play.say(1, MessageType.HISTOGRAM_REPLY, body={"round": 1})
        play.pass_time(2.6)
        play.see()
        play.begun()
        assert not [event for event in play.happened if "lost" in event.kind]
    play.work()
    play.say(1, MessageType.HISTOGRAM_REPLY, body={"round": 1})
    play.pass_time(2.6)
    assert [(event.kind, event.node) for event in play.happened if "lost" in event.kind] == [
        ("shard lost", 2)
    ]
    assert play.coordinator.ready == ENGINES


def test_stall_rotates_streaming_replica():
    play = two()
    play.start(2)
    play.begun()
    play.pass_time(2.6)
    assert play.coordinator.holders == ((3, 1), (4, 2))


def test_last_replica_has_more_time():
    play = two()
    play.coordinator.lost(1, "killed")
    play.start(2)
    for _ in range(4):
        for node in (to for to, _ in play.take(MessageType.VIEW) if to != 3):
            play.say(node, MessageType.VIEW_ACK, step=0)
        play.pass_time(2.2)
    assert play.coordinator.holders == ((3,), (2, 4))
    for _ in range(4):
        for node in (to for to, _ in play.take(MessageType.VIEW) if to != 3):
            play.say(node, MessageType.VIEW_ACK, step=0)
        play.pass_time(2.2)
    assert play.coordinator.holders[0] == ()


@pytest.mark.parametrize(
    "shards", [None, [], [1, 2], [[]], [[1], []], [[1], [1]], [[100]], [["1"]], [[True]], "1"]
)
def test_invalid_view_is_refused(shards):
    with pytest.raises(ProtocolError, match="a view"):
        MembershipView.read({"shards": shards, "engines": [100]})


def test_view_round_trip():
    view = MembershipView(SHARDS, ENGINES)
    assert MembershipView.read(view.as_body()) == view
    assert view.shard_nodes == (1, 3, 2, 4)
