"""The conductor alone: what it says to nodes that the tests play."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from any_message import messages
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import NonFiniteError, PenstockError, StorageError
from penstock.fabric.messages import Kind, Message
from penstock.fabric.nodes import (
    Conductor,
    Happened,
    Leases,
    Outcome,
    Part,
    TroubleError,
    WentBackError,
    checks,
)

SHARDS, ENGINES = (1, 2), (100, 101, 102)


class Order:
    """A step of so many micro-batches, with rows of one number each."""

    def __init__(self, step: int, micro_batches: int = 8) -> None:
        self.step, self.micro_batches = step, micro_batches
        self.forbidden: Exception | None = None

    def parts(self, engines: int) -> list[Part]:
        return [Part({"total": self.micro_batches}, {"x": np.zeros(1)})] * engines

    def report(self, message) -> dict:
        checks.integer(message, "shard", 0, {"shard": 0} | dict(message.body))
        return dict(message.body)

    answer = report

    def decide(self, losses, prepared) -> dict:
        if self.forbidden is not None:
            raise self.forbidden
        return {"scale": sum(losses)}


class Play:
    """A conductor, and the nodes that it speaks to."""

    def __init__(
        self,
        engines=ENGINES,
        wanted: int | None = None,
        agreed: bool = True,
        shards=((1,), (2,)),
    ) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.happened: list[Happened] = []
        self.ended: list[Outcome] = []
        leases = Leases(silence=1.0, stall=2.0, job=10.0)
        self.conductor = Conductor(
            self,
            shards,
            wanted or len(engines) or 1,
            leases,
            self.happened.append,
        )
        self.now = 100.0
        self.conductor.tick(self.now)
        for engine in engines:
            self.conductor.joined(engine)
        if agreed and engines:
            self.start(1)
            self.see()
            self.agree([[0]] * len(self.conductor.roster.holders.nodes))
            self.finish()
            self.ended.clear()

    def send(self, to: int, message: Message) -> None:
        self.sent.append((to, message))

    def take(self, kind: Kind) -> list[tuple[int, Message]]:
        """The messages of a kind that were sent since the last look at it."""
        found = [entry for entry in self.sent if entry[1].kind is kind]
        self.sent = [entry for entry in self.sent if entry[1].kind is not kind]
        return found

    def start(self, step: int, **fields) -> Order:
        order = Order(step, **fields)
        self.conductor.start(order, self.ended.append)
        return order

    def say(self, sender: int, kind: Kind, **fields) -> None:
        step = fields.pop("step", self.conductor._step)
        epoch = fields.pop("epoch", self.conductor.epoch)
        self.conductor.handle(Message(kind, epoch, sender, step, **fields))

    def see(self) -> list[int]:
        """All that are told of the new epoch have seen it; returns them."""
        told = [to for to, _ in self.take(Kind.VIEW)]
        for node in told:
            self.say(node, Kind.SEEN, step=0)
        return told

    def agree(self, steps=([0], [0])) -> list[int]:
        """The shards say what they hold, and go back; returns to which step."""
        for (shard, _), held in zip(self.take(Kind.HOLDS), steps, strict=True):
            self.say(shard, Kind.HOLDS, step=0, body={"steps": held})
        asked = self.take(Kind.GO_BACK)
        for shard, message in asked:
            self.say(shard, Kind.GO_BACK, step=0, body=dict(message.body))
        return [message.body["to"] for _, message in asked]

    def begun(self) -> list[int]:
        return [to for to, _ in self.take(Kind.BEGIN)]

    def work(self) -> None:
        """The engines of the view send their losses, the shards have all gradients."""
        for engine in self.conductor.engines:
            self.lose(engine)
        for shard in self.conductor.roster.holders.nodes:
            self.say(shard, Kind.PREPARED)

    def lose(self, engine: int) -> None:
        engines = self.conductor.engines
        place, total = engines.index(engine), self.conductor._attempt.order.micro_batches
        count = total * (place + 1) // len(engines) - total * place // len(engines)
        self.say(engine, Kind.LOSSES, body={"losses": [(1.0).hex()] * count})

    def finish(self) -> None:
        self.begun()
        self.work()
        for shard, _ in self.take(Kind.COMMIT):
            self.say(shard, Kind.COMMITTED, body={"shard": shard})

    def pass_time(self, seconds: float, busy=(), silent=(), beat: float = 0.2) -> None:
        for _ in range(round(seconds / beat)):
            for node in (*self.conductor.roster.holders.nodes, *self.conductor.ready):
                if node not in silent:
                    body = {"progress": 0, "busy": node in busy}
                    self.say(node, Kind.BEAT, epoch=0, body=body)
            self.now += beat
            self.conductor.tick(self.now)


def test_a_step_is_made_and_told_to_all():
    play = Play()
    play.start(2)
    assert sorted(play.begun()) == [*SHARDS, *ENGINES]  # without a new epoch
    play.work()
    assert [m.body for _, m in play.take(Kind.COMMIT)] == [{"scale": 8.0}] * 2
    play.say(1, Kind.COMMITTED, body={"shard": 1})
    assert not play.ended
    play.say(1, Kind.COMMITTED, body={"shard": 1})  # a repetition is not the other shard
    assert not play.ended
    play.say(2, Kind.COMMITTED, body={"shard": 2})
    (outcome,) = play.ended
    assert (outcome.step, list(outcome.losses), outcome.error) == (2, [1.0] * 8, None)
    assert list(outcome.answers) == [{"shard": 1}, {"shard": 2}]


def test_no_more_engines_than_micro_batches_take_part():
    play = Play(tuple(range(100, 110)), agreed=False)
    play.start(1, micro_batches=4)
    assert play.conductor.engines == (100, 101, 102, 103)


def test_only_so_many_engines_take_part_as_are_wanted_and_spare_ones_replace_them():
    play = Play(wanted=2)
    assert play.conductor.engines == (100, 101)
    play.start(2)
    play.begun()
    play.conductor.lost(100, "killed")
    assert play.conductor.engines == (101, 102)
    play.see()
    assert sorted(play.begun()) == [1, 2, 101, 102]


def test_another_number_of_engines_counts_from_the_next_step_on():
    play = Play()
    play.start(2)
    play.conductor.wanted = 1
    play.finish()
    assert play.ended[-1].error is None
    play.start(3)
    assert play.conductor.engines == (100,)
    with pytest.raises(ValueError, match="0 engines are wanted; a run needs at least one"):
        play.conductor.wanted = 0


def test_without_engines_it_waits_for_the_first():
    play = Play(engines=())
    play.start(1)
    assert not play.sent
    play.conductor.joined(100)
    assert sorted(to for to, _ in play.take(Kind.VIEW)) == [1, 2, 100]


@pytest.mark.parametrize("last", [*SHARDS, *ENGINES])
def test_nobody_begins_before_all_have_seen_the_epoch(last):
    play = Play(agreed=False)
    play.start(1)
    for node in (to for to, _ in play.take(Kind.VIEW) if to != last):
        play.say(node, Kind.SEEN, step=0)
        play.say(node, Kind.SEEN, step=0)
    play.say(last, Kind.SEEN, step=0, epoch=play.conductor.epoch - 1)
    assert not play.take(Kind.HOLDS)
    play.say(last, Kind.SEEN, step=0)
    assert play.take(Kind.HOLDS)


def test_a_step_that_was_refused_begins_in_a_new_epoch_if_it_is_tried_again():
    play = Play()
    order = play.start(2)
    order.forbidden = NonFiniteError("the loss is NaN")
    play.begun()
    play.work()
    assert play.ended[-1].error is order.forbidden
    epoch = play.conductor.epoch
    play.start(2)
    assert play.conductor.epoch == epoch + 1, "gradients of the first trial would count"
    play.see()
    play.finish()
    assert play.ended[-1].error is None


def test_what_other_steps_epochs_and_nodes_say_does_not_count():
    play = Play()
    play.start(2)
    play.say(999, Kind.LOSSES, body={"losses": []})
    play.say(999, Kind.PREPARED)
    play.say(100, Kind.LOSSES, step=1, body={"losses": []})
    play.say(100, Kind.LOSSES, epoch=play.conductor.epoch - 1, body={"losses": []})
    play.lose(100)
    play.lose(101)
    for shard in SHARDS:
        play.say(shard, Kind.PREPARED)
    assert not play.take(Kind.COMMIT)
    assert not play.ended
    play.lose(102)
    assert play.take(Kind.COMMIT)


def test_after_the_decision_an_engine_does_not_matter_and_a_shard_does():
    play = Play()
    play.start(2)
    play.begun()
    play.work()
    play.conductor.lost(100, "killed")
    play.say(101, Kind.TROUBLE, body={"error": "RuntimeError", "text": "out of memory"})
    assert not play.ended
    play.say(1, Kind.TROUBLE, body={"error": "StorageError", "text": "disk full"})
    error = play.ended[-1].error
    assert isinstance(error, TroubleError)
    assert (error.node, error.kind, str(error)) == (1, "StorageError", "disk full")
    # The other shard may have committed, so that they have to agree before they go on.
    play.start(2)
    play.see()
    assert play.agree(([0, 1], [1, 2])) == [1, 1]
    assert play.begun()


def test_a_damaged_message_is_said_again_when_nothing_else_is_lost():
    play = Play()
    play.start(2)
    play.begun()
    play.work()
    play.take(Kind.COMMIT)
    epoch = play.conductor.epoch
    play.say(1, Kind.COMMITTED)
    play.say(2, Kind.DAMAGED, step=0, body={"text": "checksum"})
    assert [to for to, _ in play.take(Kind.COMMIT)] == [2]
    assert play.conductor.epoch == epoch
    play.say(2, Kind.COMMITTED)
    assert play.ended[-1].error is None


def test_a_damaged_message_costs_the_attempt():
    play = Play()
    play.start(2)
    play.say(1, Kind.DAMAGED, step=0, body={"text": "checksum"})
    assert sorted(play.see()) == [*SHARDS, *ENGINES]
    play.finish()
    assert play.ended[-1].error is None


def test_a_commit_that_stands_still_is_said_again_to_those_who_have_not_answered():
    play = Play()
    play.start(2)
    play.begun()
    play.work()
    play.take(Kind.COMMIT)
    play.say(2, Kind.COMMITTED)
    play.pass_time(2.5)
    assert {to for to, _ in play.take(Kind.COMMIT)} == {1}


def test_a_silent_engine_is_lost_and_the_step_begins_anew():
    play = Play()
    play.start(2)
    play.pass_time(1.3, silent=[101])
    assert play.happened[-1].text.startswith("engine 101: silent for 1.")
    assert play.conductor.engines == (100, 102)


def test_a_silent_shard_is_lost():
    play = Play()
    play.start(2)
    play.pass_time(0.2)
    play.pass_time(1.3, silent=[2])
    error = play.ended[-1].error
    assert isinstance(error, TroubleError)
    assert error.node == 2


def test_silence_while_this_process_itself_stood_still_is_nobodys():
    play = Play()
    play.start(2)
    play.pass_time(0.4)
    play.now += 60  # a laptop that was closed
    play.conductor.tick(play.now)
    play.pass_time(0.4)
    assert len(play.conductor.ready) == 3
    assert not play.ended


@pytest.mark.parametrize("node", [2, 101])
def test_who_is_silent_and_known_to_be_there_is_not_lost(node):
    play, asked = Play(), []

    def is_there(which: int, silent: float) -> bool:
        asked.append((which, silent > 1.0))
        return play.now < 105.0

    play.conductor._is_there = is_there
    play.start(2)
    play.pass_time(4.0, silent=[node])
    assert node in play.conductor.roster
    play.pass_time(2.0, silent=[node])
    assert node not in play.conductor.roster
    assert set(asked) == {(node, True)}


def test_of_a_pause_of_this_process_only_the_usual_part_is_silence_of_others():
    play = Play()
    play.start(2)
    play.pass_time(0.2)
    for _ in range(3):  # shorter than half a lease, one after the other
        play.now += 0.45
        play.conductor.tick(play.now)
    assert len(play.conductor.ready) == 3  # of each a quarter of a lease counts
    play.pass_time(0.4, silent=ENGINES)
    assert not play.conductor.ready


def test_who_computes_may_take_longer_than_a_standstill_but_not_for_ever():
    play = Play()
    play.start(2)
    play.begun()
    epoch = play.conductor.epoch
    play.pass_time(8.0, busy=[101])
    assert play.conductor.epoch == epoch
    play.pass_time(4.0, busy=[101])
    assert play.conductor.ready == (100, 102)
    assert "which is over cluster.longest_job" in play.happened[-1].text


def test_when_two_engines_take_too_long_for_a_stage_the_run_ends_and_says_what_to_raise():
    play = Play()
    play.start(2)
    for engine in (101, 100):
        play.begun()
        play.pass_time(11.0, busy=[engine])
        play.see()
    error = play.ended[-1].error
    assert isinstance(error, TroubleError)
    assert (error.node, error.kind) == (100, "ClusterError")
    assert "engines 101 and 100 have met the same error" in str(error)
    assert "over cluster.longest_job; if a stage of its share" in str(error)


def test_a_lost_shard_ends_the_step_and_the_next_waits_until_it_is_back():
    play = Play()
    play.start(2)
    play.begun()
    play.conductor.lost(1, "killed")
    play.conductor.lost(1, "killed")  # once is enough
    assert len(play.ended) == 1
    assert play.ended[0].error.node == 1
    play.start(2)
    assert not play.take(Kind.VIEW)
    play.conductor.shard_joined(0, 7)
    assert sorted(play.see()) == [2, 7, *ENGINES]
    assert play.agree(([0, 1], [1])) == [1, 1]
    assert sorted(play.begun()) == [2, 7, *ENGINES]
    play.say(1, Kind.PREPARED)  # a zombie
    play.say(2, Kind.PREPARED)
    for engine in ENGINES:
        play.lose(engine)
    assert not play.take(Kind.COMMIT)


@pytest.mark.parametrize(
    ("held", "step", "to"),
    [
        (([3, 4], [4, 5]), 6, 4),
        (([5], [4, 5]), 6, 5),
        (([3, 4], [3, 4]), 5, 4),
        (([4, 5], [4, 5]), 5, 4),  # 5 is stored, but its losses were never told
        (([5], [4, 5]), 5, 5),
    ],
)
def test_all_shards_go_back_to_the_newest_step_that_all_hold(held, step, to):
    play = Play(agreed=False)
    play.start(step)
    play.see()
    assert play.agree(held) == [to, to]
    if to == step - 1:
        assert not play.ended
        return
    error = play.ended[-1].error
    assert isinstance(error, WentBackError)
    assert error.step == to
    epoch = play.conductor.epoch
    play.start(to + 1)
    assert play.begun()
    assert play.conductor.epoch == epoch


def test_shards_that_hold_no_step_in_common_are_an_error_that_says_what_they_hold():
    play = Play(agreed=False)
    play.start(3)
    play.see()
    assert play.agree(([1], [2])) == []
    assert isinstance(play.ended[-1].error, StorageError)
    assert str(play.ended[-1].error) == (
        "no step is held by all shards (shard 0 has [1], shard 1 has [2]); resume from a checkpoint"
    )


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
def test_losses_that_make_no_sense_cost_the_engine_its_place(body):
    play = Play()
    play.start(2)
    play.say(100, Kind.LOSSES, body=body)
    assert play.conductor.ready == (101, 102)
    assert "node 100 sent a LOSSES message that has other than" in play.happened[-1].text
    play.see()
    play.finish()
    assert play.ended.pop().error is None


@pytest.mark.parametrize("steps", [None, "all", [1, "two"], {"1": 2}])
def test_held_steps_that_make_no_sense_cost_the_shard_its_place(steps):
    play = Play(agreed=False)
    play.start(2)
    play.see()
    play.say(1, Kind.HOLDS, step=0, body={"steps": steps})
    assert isinstance(play.ended[-1].error, TroubleError)
    assert play.happened[-1].kind == "shard lost"
    assert "node 1 sent a HOLDS message that holds" in play.happened[-1].text


@pytest.mark.parametrize("kind", [Kind.PREPARED, Kind.COMMITTED])
def test_what_a_shard_says_of_its_gradients_or_commit_must_make_sense(kind):
    play = Play()
    play.start(2)
    if kind is Kind.COMMITTED:
        play.work()
    play.say(1, kind, body={"shard": "one"})
    assert isinstance(play.ended[-1].error, TroubleError)
    assert f"node 1 sent a {kind.name} message" in play.happened[-1].text


@pytest.mark.parametrize("body", [{}, {"progress": "far"}, {"progress": -1}, {"progress": None}])
def test_a_beat_that_makes_no_sense_costs_the_engine_its_place(body):
    play = Play()
    play.start(2)
    play.say(101, Kind.BEAT, epoch=0, body=body)
    assert play.conductor.ready == (100, 102)
    play.say(999, Kind.BEAT, epoch=0, body=body)  # of one who is nobody
    assert play.conductor.ready == (100, 102)


def test_a_message_that_makes_no_sense_to_an_engine_costs_its_sender_the_place():
    play = Play()
    play.start(2)
    body = {"error": "ProtocolError", "text": "node 102 sent a GRADIENT message", "about": 102}
    play.say(100, Kind.TROUBLE, body=body)
    assert play.conductor.ready == (100, 101)


def test_trouble_of_one_who_takes_no_part_counts_for_nothing():
    play = Play(wanted=2)
    play.start(2)
    for sender in (102, 999):
        play.say(sender, Kind.TROUBLE, body={"error": "ValueError", "text": "no"})
    assert not play.ended
    assert play.conductor.ready == ENGINES


def test_nothing_is_kept_of_nodes_that_have_gone():
    play = Play()
    for step in range(2, 102):
        play.start(step)
        play.see()
        play.finish()
        gone = play.conductor.ready[0]
        play.conductor.lost(gone, "killed")
        play.say(gone, Kind.BEAT, epoch=0, body={"progress": 1})
        play.conductor.joined(100 + 3 * step)
    assert all(outcome.error is None for outcome in play.ended)
    conductor = play.conductor
    assert conductor._attempt is None
    inner = (conductor, conductor.roster, conductor._formation, conductor._remedies._patience)
    parts = [value for each in inner for value in vars(each).values()]
    held = [v for v in parts if isinstance(v, (dict, set, list))]
    assert max(map(len, held)) <= 8


def test_a_step_that_is_given_up_leaves_the_conductor_at_rest():
    play = Play()
    play.start(2)
    play.conductor.cancel()
    assert isinstance(play.ended.pop().error, InterruptedError)
    play.start(2)
    play.see()  # in a new epoch, so that nothing of the first attempt counts
    play.finish()
    assert play.ended.pop().error is None


def test_after_a_step_that_failed_all_are_told_of_an_epoch_in_which_nobody_begins():
    play = Play()
    play.start(2)
    play.see()
    assert play.begun()
    epoch = play.conductor.epoch
    play.conductor.cancel()
    play.take(Kind.VIEW)
    play.conductor.disband()
    told = play.take(Kind.VIEW)
    assert {to for to, _ in told} == {*SHARDS, *ENGINES}
    assert {message.epoch for _, message in told} == {epoch + 1}
    for node in (*SHARDS, *ENGINES):
        play.say(node, Kind.SEEN, step=0)
    assert not play.begun()
    play.start(2)
    play.see()
    play.finish()
    assert play.ended.pop().error is None


def test_before_the_first_view_there_is_nothing_to_disband():
    play = Play(engines=(), wanted=1)
    play.start(1)
    play.conductor.cancel()
    play.conductor.disband()
    assert play.conductor.epoch == 0
    assert not play.take(Kind.VIEW)  # one without engines would be refused as damaged


def test_a_step_that_is_decided_is_not_given_up():
    play = Play()
    play.start(2)
    play.work()
    assert play.conductor.phase.name == "COMMITTING"
    play.conductor.cancel()
    assert not play.ended
    for shard in SHARDS:
        play.say(shard, Kind.COMMITTED)
    assert play.ended.pop().error is None


@settings(max_examples=60, deadline=None)
@given(st.lists(messages([0, *SHARDS, *ENGINES, 7]), max_size=6), st.integers(0, 3))
def test_no_message_can_make_the_conductor_raise(received, phase):
    play = Play(agreed=False)
    play.start(1)
    for advance in (play.see, play.agree, play.work)[:phase]:
        advance()
    for message in received:
        epoch, step = play.conductor.epoch, play.conductor._step
        play.conductor.handle(message)
        play.conductor.handle(dataclasses.replace(message, epoch=epoch, step=step))
        play.now += 0.1
        play.conductor.tick(play.now)
    for outcome in play.ended:
        assert outcome.error is None or isinstance(
            outcome.error, (TroubleError, WentBackError, PenstockError)
        )
