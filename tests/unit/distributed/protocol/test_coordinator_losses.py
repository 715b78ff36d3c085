"""The coordinator alone: who counts as lost, and where the run goes on from."""

from __future__ import annotations

import pytest
from coordinator_play import ENGINES, Play

from penstock.distributed.protocol import (
    RolledBackError,
    UnrecoverableError,
)
from penstock.distributed.protocol.messages import MessageType
from penstock.errors import StorageError


def test_silent_engine_is_lost_and_step_is_retried():
    play = Play()
    play.start(2)
    play.pass_time(1.3, silent=[101])
    assert play.happened[-1].text.startswith("engine 101: silent for 1.")
    assert play.coordinator.engines == (100, 102)


def test_silent_shard_is_lost():
    play = Play()
    play.start(2)
    play.pass_time(0.2)
    play.pass_time(1.3, silent=[2])
    error = play.ended[-1].error
    assert isinstance(error, UnrecoverableError)
    assert error.node == 2


def test_first_shard_is_lost_if_it_is_silent_from_the_time_at_which_it_is_ready():
    play = Play(agreed=False)
    play.pass_time(5.0, silent=[1, 2])  # their processes have not started
    assert play.coordinator.holders == ((1,), (2,))
    play.coordinator.watch(2)
    play.pass_time(1.3, silent=[1, 2])
    assert play.coordinator.holders == ((1,), ())


def test_pause_of_coordinator_is_not_silence():
    play = Play()
    play.start(2)
    play.pass_time(0.4)
    play.now += 60  # a laptop that was closed
    play.coordinator.tick(play.now)
    play.pass_time(0.4)
    assert len(play.coordinator.ready) == 3
    assert not play.ended


@pytest.mark.parametrize("node", [2, 101])
def test_silent_node_known_to_be_alive_is_kept(node):
    play, asked = Play(), []

    def is_alive(which: int, silent: float) -> bool:
        asked.append((which, silent > 1.0))
        return play.now < 105.0

    play.coordinator._is_alive = is_alive
    play.start(2)
    play.pass_time(4.0, silent=[node])
    assert node in play.coordinator.membership
    play.pass_time(2.0, silent=[node])
    assert node not in play.coordinator.membership
    assert set(asked) == {(node, True)}


def test_step_of_a_node_that_cannot_send_heartbeats_is_not_retried_before_twice_the_stall():
    """A library call may hold up its heartbeats, and began after the last one."""
    play = Play()
    play.coordinator._is_alive = lambda which, silent: True
    play.start(2)
    play.begun()
    epoch = play.coordinator.epoch
    play.pass_time(3.8, silent=[101])
    assert play.coordinator.epoch == epoch
    done = {101: 1}
    play.pass_time(0.2, progress=done)  # the call has ended
    play.pass_time(3.4, progress=done, silent=[102])
    assert play.coordinator.epoch == epoch
    play.pass_time(1.0, progress=done, silent=[102])
    assert play.coordinator.epoch == epoch + 1


def test_only_usual_part_of_pause_counts_as_silence():
    play = Play()
    play.start(2)
    play.pass_time(0.2)
    for _ in range(3):  # shorter than half a lease, one after the other
        play.now += 0.45
        play.coordinator.tick(play.now)
    assert len(play.coordinator.ready) == 3  # of each a quarter of a lease counts
    play.pass_time(0.4, silent=ENGINES)
    assert not play.coordinator.ready


def test_busy_node_may_exceed_stall_but_not_longest_job():
    play = Play()
    play.start(2)
    play.begun()
    epoch = play.coordinator.epoch
    play.pass_time(8.0, busy=[101])
    assert play.coordinator.epoch == epoch
    play.pass_time(4.0, busy=[101])
    assert play.coordinator.ready == (100, 102)
    assert "longer than cluster.longest_job" in play.happened[-1].text


def test_two_engines_over_longest_job_end_run():
    play = Play()
    play.start(2)
    for engine in (101, 100):
        play.begun()
        play.pass_time(11.0, busy=[engine])
        play.see()
    error = play.ended[-1].error
    assert isinstance(error, UnrecoverableError)
    assert (error.node, error.kind) == (100, "ClusterError")
    assert "engines 101 and 100 failed with the same error" in str(error)
    assert "longer than cluster.longest_job; if a stage" in str(error)


def test_step_after_lost_shard_waits_for_replacement():
    play = Play()
    play.start(2)
    play.begun()
    play.coordinator.lost(1, "killed")
    play.coordinator.lost(1, "killed")  # once is enough
    assert len(play.ended) == 1
    assert play.ended[0].error.node == 1
    play.start(2)
    assert not play.take(MessageType.VIEW)
    play.coordinator.shard_joined(0, 7)
    assert sorted(play.see()) == [2, 7, *ENGINES]
    assert play.agree(([0, 1], [1])) == [1, 1]
    assert sorted(play.begun()) == [2, 7, *ENGINES]
    play.say(1, MessageType.PREPARED)  # a zombie
    play.say(2, MessageType.PREPARED)
    for engine in ENGINES:
        play.lose(engine)
    assert not play.take(MessageType.COMMIT)


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
def test_shards_roll_back_to_newest_common_step(held, step, to):
    play = Play(agreed=False)
    play.start(step)
    play.see()
    assert play.agree(held) == [to, to]
    if to == step - 1:
        assert not play.ended
        return
    error = play.ended[-1].error
    assert isinstance(error, RolledBackError)
    assert error.step == to
    epoch = play.coordinator.epoch
    play.start(to + 1)
    assert play.begun()
    assert play.coordinator.epoch == epoch


def test_shards_without_common_step_are_refused():
    play = Play(agreed=False)
    play.start(3)
    play.see()
    assert play.agree(([1], [2])) == []
    assert isinstance(play.ended[-1].error, StorageError)
    assert str(play.ended[-1].error) == (
        "no step is held by all shards (shard 0 has [1], shard 1 has [2]); resume from a checkpoint"
    )


def test_state_of_lost_nodes_is_dropped():
    play = Play()
    for step in range(2, 102):
        play.start(step)
        play.see()
        play.finish()
        gone = play.coordinator.ready[0]
        play.coordinator.lost(gone, "killed")
        play.say(gone, MessageType.HEARTBEAT, epoch=0, body={"progress": 1, "received": 0})
        play.coordinator.joined(100 + 3 * step)
    assert all(outcome.error is None for outcome in play.ended)
    coordinator = play.coordinator
    assert coordinator._transaction is None
    inner = (
        coordinator,
        coordinator.membership,
        coordinator._epochs,
        coordinator._recovery._retry_budget,
    )
    parts = [value for each in inner for value in vars(each).values()]
    held = [v for v in parts if isinstance(v, (dict, set, list))]
    assert max(map(len, held)) <= 8
