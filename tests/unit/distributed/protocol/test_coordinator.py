"""The coordinator alone: how a step is made, decided, given up and tried again."""

from __future__ import annotations

import pytest
from coordinator_play import ENGINES, SHARDS, Play

from penstock.distributed.protocol import (
    UnrecoverableError,
)
from penstock.distributed.protocol.messages import MessageType
from penstock.errors import NonFiniteError


def test_step_runs_and_is_committed_on_all_shards():
    play = Play()
    play.start(2)
    assert sorted(play.begun()) == [*SHARDS, *ENGINES]  # without a new epoch
    play.work()
    assert [m.body for _, m in play.take(MessageType.COMMIT)] == [{"scale": 8.0}] * 2
    play.say(1, MessageType.COMMITTED, body={"shard": 1})
    assert not play.ended
    play.say(1, MessageType.COMMITTED, body={"shard": 1})  # a repetition is not the other shard
    assert not play.ended
    play.say(2, MessageType.COMMITTED, body={"shard": 2})
    (outcome,) = play.ended
    assert (outcome.step, list(outcome.losses), outcome.error) == (2, [1.0] * 8, None)
    assert list(outcome.answers) == [{"shard": 1}, {"shard": 2}]


def test_engines_are_limited_by_micro_batches():
    play = Play(tuple(range(100, 110)), agreed=False)
    play.start(1, micro_batches=4)
    assert play.coordinator.engines == (100, 101, 102, 103)


def test_a_spare_engine_is_named_as_one_when_it_joins():
    play = Play(wanted=2)
    texts = [event.text for event in play.happened if event.kind == "joined"]
    assert texts == [
        "engine 100 is ready",
        "engine 101 is ready",
        "engine 102 is ready, as a spare: 2 take part",
    ]


def test_spare_engines_replace_lost_engines():
    play = Play(wanted=2)
    assert play.coordinator.engines == (100, 101)
    play.start(2)
    play.begun()
    play.coordinator.lost(100, "killed")
    assert play.coordinator.engines == (101, 102)
    play.see()
    assert sorted(play.begun()) == [1, 2, 101, 102]


def test_changed_number_of_engines_applies_from_next_step():
    play = Play()
    play.start(2)
    play.coordinator.wanted = 1
    play.finish()
    assert play.ended[-1].error is None
    play.start(3)
    assert play.coordinator.engines == (100,)
    with pytest.raises(ValueError, match="expected at least 1 engine, got 0"):
        play.coordinator.wanted = 0


def test_step_waits_for_first_engine():
    play = Play(engines=())
    play.start(1)
    assert not play.sent
    play.coordinator.joined(100)
    assert sorted(to for to, _ in play.take(MessageType.VIEW)) == [1, 2, 100]


@pytest.mark.parametrize("last", [*SHARDS, *ENGINES])
def test_step_begins_after_all_acknowledge_epoch(last):
    play = Play(agreed=False)
    play.start(1)
    for node in (to for to, _ in play.take(MessageType.VIEW) if to != last):
        play.say(node, MessageType.VIEW_ACK, step=0)
        play.say(node, MessageType.VIEW_ACK, step=0)
    play.say(last, MessageType.VIEW_ACK, step=0, epoch=play.coordinator.epoch - 1)
    assert not play.take(MessageType.HELD_STEPS)
    play.say(last, MessageType.VIEW_ACK, step=0)
    assert play.take(MessageType.HELD_STEPS)


def test_refused_step_is_retried_in_new_epoch():
    play = Play()
    order = play.start(2)
    order.forbidden = NonFiniteError("the loss is NaN")
    play.begun()
    play.work()
    assert play.ended[-1].error is order.forbidden
    epoch = play.coordinator.epoch
    play.start(2)
    assert play.coordinator.epoch == epoch + 1, "gradients of the first trial would count"
    play.see()
    play.finish()
    assert play.ended[-1].error is None


def test_messages_of_other_steps_epochs_and_nodes_are_ignored():
    play = Play()
    play.start(2)
    play.say(999, MessageType.LOSSES, body={"losses": []})
    play.say(999, MessageType.PREPARED)
    play.say(100, MessageType.LOSSES, step=1, body={"losses": []})
    play.say(100, MessageType.LOSSES, epoch=play.coordinator.epoch - 1, body={"losses": []})
    play.lose(100)
    play.lose(101)
    for shard in SHARDS:
        play.say(shard, MessageType.PREPARED)
    assert not play.take(MessageType.COMMIT)
    assert not play.ended
    play.lose(102)
    assert play.take(MessageType.COMMIT)


def test_after_decision_only_shard_loss_matters():
    play = Play()
    play.start(2)
    play.begun()
    play.work()
    play.coordinator.lost(100, "killed")
    play.say(101, MessageType.FAILURE, body={"error": "RuntimeError", "text": "out of memory"})
    assert not play.ended
    play.say(1, MessageType.FAILURE, body={"error": "StorageError", "text": "disk full"})
    error = play.ended[-1].error
    assert isinstance(error, UnrecoverableError)
    assert (error.node, error.kind, str(error)) == (1, "StorageError", "disk full")
    # The other shard may have committed, so that they have to agree before they go on.
    play.start(2)
    play.see()
    assert play.agree(([0, 1], [1, 2])) == [1, 1]
    assert play.begun()


def test_decision_is_resent_after_corrupt_frame():
    play = Play()
    play.start(2)
    play.begun()
    play.work()
    play.take(MessageType.COMMIT)
    epoch = play.coordinator.epoch
    play.say(1, MessageType.COMMITTED)
    play.say(2, MessageType.CORRUPT_FRAME, step=0, body={"text": "checksum"})
    assert [to for to, _ in play.take(MessageType.COMMIT)] == [2]
    assert play.coordinator.epoch == epoch
    play.say(2, MessageType.COMMITTED)
    assert play.ended[-1].error is None


def test_corrupt_frame_retries_step_in_new_epoch():
    play = Play()
    play.start(2)
    play.say(1, MessageType.CORRUPT_FRAME, step=0, body={"text": "checksum"})
    assert sorted(play.see()) == [*SHARDS, *ENGINES]
    play.finish()
    assert play.ended[-1].error is None


def test_stalled_commit_is_resent_to_unacknowledged_nodes():
    play = Play()
    play.start(2)
    play.begun()
    play.work()
    play.take(MessageType.COMMIT)
    play.say(2, MessageType.COMMITTED)
    play.pass_time(2.5)
    assert {to for to, _ in play.take(MessageType.COMMIT)} == {1}


@pytest.mark.parametrize("receiver", ["engine", "shard", "coordinator"])
def test_transfer_in_progress_is_no_stall_and_one_that_stands_still_is(receiver):
    play = Play()
    play.start(2)
    play.begun()
    epoch = play.coordinator.epoch
    node = {"engine": 101, "shard": 2, "coordinator": 0}[receiver]
    for second in range(1, 8):
        play.pass_time(1.0, received={node: 10_000 * second})
    assert play.coordinator.epoch == epoch
    play.pass_time(2.6, received={node: 70_000})
    assert play.coordinator.epoch == epoch + 1


@pytest.mark.parametrize("receiver", ["engine", "shard", "coordinator"])
def test_transfer_below_the_least_rate_is_a_stall(receiver):
    """A defective peer sends a byte of a large message now and then, for ever."""
    play = Play()
    play.start(2)
    play.begun()
    epoch, received = play.coordinator.epoch, 5_000_000_000
    node = {"engine": 101, "shard": 2, "coordinator": 0}[receiver]
    play.pass_time(1.0, received={node: received})
    for _ in range(8):
        received += 1_000
        play.pass_time(0.4, received={node: received})
    assert play.coordinator.epoch == epoch + 1


def test_slow_transfer_to_several_nodes_that_share_a_link_is_no_stall():
    play = Play()
    play.start(2)
    play.begun()
    epoch = play.coordinator.epoch
    for second in range(1, 8):
        play.pass_time(1.0, received=dict.fromkeys(ENGINES, 4_000 * second))
    assert play.coordinator.epoch == epoch


def test_cancelled_step_leaves_coordinator_idle():
    play = Play()
    play.start(2)
    play.coordinator.cancel()
    assert isinstance(play.ended.pop().error, InterruptedError)
    play.start(2)
    play.see()  # in a new epoch, so that nothing of the first attempt counts
    play.finish()
    assert play.ended.pop().error is None


def test_failed_step_is_fenced_by_new_epoch():
    play = Play()
    play.start(2)
    play.see()
    assert play.begun()
    epoch = play.coordinator.epoch
    play.coordinator.cancel()
    play.take(MessageType.VIEW)
    play.coordinator.advance_epoch()
    told = play.take(MessageType.VIEW)
    assert {to for to, _ in told} == {*SHARDS, *ENGINES}
    assert {message.epoch for _, message in told} == {epoch + 1}
    for node in (*SHARDS, *ENGINES):
        play.say(node, MessageType.VIEW_ACK, step=0)
    assert not play.begun()
    play.start(2)
    play.see()
    play.finish()
    assert play.ended.pop().error is None


def test_no_epoch_is_fenced_before_first_view():
    play = Play(engines=(), wanted=1)
    play.start(1)
    play.coordinator.cancel()
    play.coordinator.advance_epoch()
    assert play.coordinator.epoch == 0
    assert not play.take(MessageType.VIEW)  # one without engines would be refused as damaged


def test_decided_step_is_not_cancelled():
    play = Play()
    play.start(2)
    play.work()
    assert play.coordinator.phase.name == "COMMITTING"
    play.coordinator.cancel()
    assert not play.ended
    for shard in SHARDS:
        play.say(shard, MessageType.COMMITTED)
    assert play.ended.pop().error is None
