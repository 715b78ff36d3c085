"""The coordinator and relays: who takes part, who is suspected, and which rows are sent ahead."""

from __future__ import annotations

import pytest
from coordinator_play import ENGINES, SHARDS, Order, Play

from penstock.distributed.protocol import EngineInput, step_transaction
from penstock.distributed.protocol.messages import MessageType, unpack_arrays
from penstock.errors import ConfigError

RELAYS = (500, 501)


def test_relays_begin_with_the_number_of_micro_batches_and_report_nothing():
    play = Play(relays=RELAYS)
    play.start(2)
    begun = dict(play.take(MessageType.BEGIN))
    assert sorted(begun) == [*SHARDS, *ENGINES, *RELAYS]
    assert [dict(begun[relay].body) for relay in RELAYS] == [{"total": 8}] * 2
    play.finish()
    assert play.ended[-1].error is None


def test_lost_relay_repeats_the_step_without_it():
    play = Play(relays=RELAYS)
    play.start(2)
    play.begun()
    play.coordinator.lost(500, "killed")
    assert [event.kind for event in play.happened][-1] == "relay lost"
    assert sorted(play.see()) == [*SHARDS, *ENGINES, 501]
    assert sorted(play.begun()) == [*SHARDS, *ENGINES, 501]


def test_relay_lost_after_the_decision_repeats_nothing():
    play = Play(relays=RELAYS)
    play.start(2)
    play.begun()
    play.work()
    play.coordinator.lost(500, "killed")
    assert not play.take(MessageType.VIEW)
    play.finish()
    assert play.ended[-1].error is None


def test_relay_that_is_not_in_the_view_disturbs_no_step():
    play = Play(relays=RELAYS)
    play.coordinator.wanted_relays = 1
    play.start(2)
    play.see()
    play.begun()
    play.coordinator.lost(501, "killed")
    assert not play.take(MessageType.VIEW)


def test_stalled_step_loses_a_relay_before_an_engine():
    play = Play(relays=RELAYS)
    play.start(2)
    play.begun()
    lost = []
    for _ in range(3):
        play.pass_time(3.0)
        play.see()
        play.begun()
        lost = [event.node for event in play.happened if "lost" in event.kind]
    assert lost[0] == 500
    assert lost[1] in ENGINES


def test_relay_that_waits_in_no_tree_is_no_suspect_of_a_stall():
    """It has done nothing, as every relay that waits: 20 engines use 40 of 41 relays."""
    relays = range(500, 541)
    play = Play(engines=range(100, 120), relays=relays)
    play.start(2, micro_batches=20)
    play.begun()
    progress = dict.fromkeys(relays, 9) | {540: 0, 517: 4}
    for _ in range(2):
        play.pass_time(3.0, progress=progress)
        play.see()
        play.begun()
    assert [event.node for event in play.happened if "lost" in event.kind] == [517]


@pytest.mark.parametrize(("sender", "about"), [(500, None), (100, 500), (1, 500)])
def test_failed_relay_is_evicted(sender, about):
    play = Play(relays=RELAYS)
    play.start(2)
    play.begun()
    body = {"error": "ProtocolError", "text": "no sense"}
    if about is not None:  # the report of a second node accuses the sender
        body["about"] = about
        play.say(101, MessageType.FAILURE, body=body)
        play.see()
        play.begun()
    play.say(sender, MessageType.FAILURE, body=body)
    [event] = [event for event in play.happened if "lost" in event.kind]
    assert (event.kind, event.node) == ("relay lost", 500)
    assert event.text == "relay 500: it failed: ProtocolError: no sense"


def test_run_goes_on_without_relays_when_several_fail_at_one_step():
    play = Play(relays=range(500, 510))
    play.start(2)
    play.begun()
    for relay in range(500, 504):
        play.say(relay, MessageType.FAILURE, body={"error": "OSError", "text": "no room"})
        play.see()
        play.begun()
    assert [e.kind for e in play.happened][-2:] == ["no relays", "relay lost"]
    assert play.coordinator.wanted_relays == 0
    assert play.coordinator._epochs.view.relays == ()
    play.finish()
    assert play.ended[-1].error is None


def test_engine_that_two_relays_complain_about_is_evicted():
    play = Play(relays=RELAYS)
    play.start(2)
    play.begun()
    body = {"error": "ProtocolError", "text": "no sense", "about": 101}
    for relay in (500, 501):
        play.say(relay, MessageType.FAILURE, body=body)
        play.see()
        play.begun()
    assert [(e.kind, e.node) for e in play.happened if "lost" in e.kind] == [("engine lost", 101)]


def sent_rows(play: Play) -> list[tuple[int, int]]:
    found = []
    for to, message in play.take(MessageType.ROWS):
        assert "x" in unpack_arrays(message.body["rows"], message.payload)
        found.append((to, message.step))
    return found


def test_rows_of_the_next_step_are_sent_once_the_step_runs():
    play = Play()
    first, second = Order(2), Order(3)
    play.coordinator.start(first, play.ended.append, second)
    assert all("rows" in m.body for to, m in play.take(MessageType.BEGIN) if to in ENGINES)
    assert sent_rows(play) == [(engine, 3) for engine in ENGINES]
    play.finish()
    play.coordinator.start(second, play.ended.append)
    begun = play.take(MessageType.BEGIN)
    assert len(begun) == 5
    assert not any("rows" in message.body for _, message in begun)
    assert all(message.body["total"] == 8 for to, message in begun if to in ENGINES)
    play.finish()
    assert play.ended[-1].error is None


def test_rows_too_large_for_a_message_end_the_step_with_their_size(monkeypatch):
    """A connection would end with such a message: engines would be lost without end."""
    play = Play()
    monkeypatch.setattr(step_transaction, "MAX_PAYLOAD_BYTES", 7)
    first, second = Order(2), Order(3)
    first.parts = lambda engines: [EngineInput({}, {})] * engines
    play.coordinator.start(first, play.ended.append, second)
    assert not sent_rows(play)
    play.finish()
    play.coordinator.start(second, play.ended.append)
    assert not play.begun()
    text = r"batch.size: .* of step 3 .* 8 bytes, .* at most 7; lower batch.size, or"
    with pytest.raises(ConfigError, match=text):
        raise play.ended[-1].error


def test_rows_sent_ahead_count_in_their_epoch_only():
    play = Play()
    first, second = Order(2), Order(3)
    play.coordinator.start(first, play.ended.append, second)
    play.finish()
    play.coordinator.lost(102, "killed")
    play.coordinator.start(second, play.ended.append)
    play.see()
    assert all("rows" in m.body for to, m in play.take(MessageType.BEGIN) if to in ENGINES)


def test_error_of_rows_ahead_is_left_to_their_step():
    play = Play()
    first, second = Order(2), Order(3)

    def fail(engines: int):
        raise ValueError("no rows")

    second.parts = fail
    play.coordinator.start(first, play.ended.append, second)
    play.finish()
    assert play.ended[-1].error is None
    play.coordinator.start(second, play.ended.append)
    assert str(play.ended[-1].error) == "no rows"
