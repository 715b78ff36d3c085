"""When a cluster manager has workers started, and when a run ends because nobody comes; no
processes."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time

import pytest
from fake_workers import TOKEN, FakeLauncher, config, model_source
from waiting import wait_until

from penstock.distributed.control.cluster_manager import ClusterManager
from penstock.distributed.control_messages import ReplicaSlot, Role
from penstock.distributed.launchers.base import WorkerExit
from penstock.distributed.protocol import Message, MessageType
from penstock.distributed.transport import Endpoint
from penstock.errors import BudgetError, ClusterError
from penstock.planning.memory_shares import HostCapacity


def test_workers_start_for_engines_spares_and_shards(open_manager):
    assert open_manager().launcher.roles == ["engine"] * 3
    assert open_manager(shards="apart").launcher.roles == ["shard"] * 2 + ["engine"] * 3


def test_run_ends_when_no_worker_becomes_shard(open_manager):
    opened = open_manager(always_fails=True, shards="apart")
    with pytest.raises(
        ClusterError, match=r"in a row ended before they could compute, .*; worker-"
    ):
        opened.manager.remote_shards()
    opened.manager.close()
    assert {"worker ended", "not replaced"} <= {*opened.event_kinds}
    assert opened.threads == {threading.current_thread()}


def test_run_ends_when_no_worker_becomes_engine(open_manager):
    opened = open_manager(always_fails=True)
    with pytest.raises(
        ClusterError, match=r"in a row ended before they could compute, .*; worker-"
    ):
        opened.manager.await_engines()


def test_run_ends_when_replica_slot_stays_vacant(open_manager):
    opened = open_manager(start="listen", shards="apart", lease=10.0)
    member, assignment = open_manager.join(opened)
    member.report_ready(opened.manager, assignment)
    wait_until(lambda: opened.manager.coordinator.ready)
    opened.launcher.ended = [WorkerExit(f"worker-{n}", f"worker-{n} fell") for n in range(3)]
    with pytest.raises(ClusterError, match=r"3 workers in a row ended before .*; worker-2 fell"):
        opened.manager.remote_shards()
    assert len(opened.manager.coordinator.ready) == 1


def test_stop_ends_wait_for_engines(open_manager):
    opened = open_manager()
    opened.is_stopped = True
    with pytest.raises(InterruptedError):
        opened.manager.await_engines()


def test_end_of_a_step_does_not_wait_for_a_shard_that_joined_after_it(open_manager):
    """It has seen no epoch, and sees the next one only with the next step."""
    opened = open_manager(shards="apart", lease=60.0)
    manager, assignment = opened.manager, opened.manager._assignment
    for _ in range(2):
        member, given = open_manager.join(opened)
        member.report_ready(manager, given)
    wait_until(lambda: not assignment.is_incomplete)
    manager._run_in_endpoint(manager.coordinator._epochs.advance_epoch)
    assignment.lose(2)
    assignment.take(ReplicaSlot(1, 0), 1000)

    def beat(node: int, epoch: int, busy: bool) -> None:
        body = {"busy": busy, "progress": 0}
        manager.heartbeat_stats.take(Message(MessageType.HEARTBEAT, epoch, node, body=body))

    beat(1000, 0, busy=False)
    beat(1, 0, busy=False)
    beat(1, 1, busy=True)
    assert not manager.is_quiescent()
    beat(1, 1, busy=False)
    assert manager.is_quiescent()


@pytest.mark.parametrize("engines", [0, 5, "2", None])
def test_invalid_number_of_engines_is_refused(open_manager, engines):
    with pytest.raises(ClusterError, match=r"expected 1 to 4 \(one micro-batch each\), got"):
        open_manager().manager.scale(engines)


def test_engines_beyond_host_memory_are_refused(tmp_path, layout, open_manager):
    opened = open_manager()
    one = layout.room.engine
    opened.manager._layout = dataclasses.replace(layout, room=HostCapacity(10 * one, 7 * one, one))
    opened.manager.scale(3)
    with pytest.raises(BudgetError, match=r"engines: 4 on this machine need 4 x .* room for 3"):
        opened.manager.scale(4)
    reply = opened.manager._handle_admin_request({"engines": 4})
    assert reply["error"].endswith("there is room for 3")
    assert opened.manager.coordinator.wanted == 3
    opened.manager._layout = dataclasses.replace(layout, room=HostCapacity(10 * one, 9 * one, one))
    opened.manager.scale(2)  # fewer are always possible


def test_request_without_numbers_tells_wanted_and_ready_ones_and_changes_nothing(open_manager):
    opened = open_manager()
    opened.manager._run_in_endpoint(lambda: opened.manager._scale(2, 1))
    numbers = {"before": 2, "engines": 2, "engines_ready": 0}
    numbers |= {"relays_before": 1, "relays": 1, "relays_ready": 0}
    for body in ({}, {"engines": None, "relays": None}):
        assert opened.manager._handle_admin_request(body) == numbers
    coordinator = opened.manager.coordinator
    assert (coordinator.wanted, coordinator.wanted_relays) == (2, 1)
    opened.manager.event_queue.report_all()
    assert [*opened.event_kinds].count("scaled") == 1


def test_scaling_up_starts_engines_beside_shards(open_manager):
    opened = open_manager(shards="apart")
    opened.manager.scale(4)
    assert opened.launcher.started == 7
    opened.manager.scale(1)
    opened.manager.scale(3)
    assert opened.launcher.started == 7


@pytest.mark.long
def test_starved_worker_is_kept_for_ten_leases(open_manager):
    opened = open_manager(start="local", lease=0.2)
    member, assignment = open_manager.join(opened)
    opened.launcher.starving = ("guest-1",)
    began = time.monotonic()
    member.report_ready(opened.manager, assignment)
    wait_until(lambda: opened.manager.event_queue.counts["engine lost"])  # it never says a word
    assert time.monotonic() - began > 1.0


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("penstock")}


class FailingLauncher(FakeLauncher):
    """Starts one worker, and then something goes wrong that nobody has foreseen."""

    is_closed = False

    def start(self, role: Role) -> str:
        worker = super().start(role)
        if self.started == 2:
            raise RuntimeError("the second worker broke the launcher")
        return worker

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("fails", ["making the launcher", "starting workers"])
def test_failed_cluster_manager_leaves_no_resources(tmp_path, layout, fails):
    before = ours()
    launcher, addresses = FailingLauncher(False), []

    def launch(endpoint: Endpoint) -> FailingLauncher:
        addresses.append(endpoint.address)
        assert (tmp_path / "cluster.json").exists()
        if fails == "making the launcher":
            raise RuntimeError("no launcher")
        return launcher

    with pytest.raises(RuntimeError):
        ClusterManager(
            config(tmp_path),
            layout,
            model_source(),
            host="127.0.0.1",
            token=TOKEN,
            launch=launch,
            tell=lambda event: None,
            should_stop=lambda: False,
        )
    wait_until(lambda: not ours() - before)
    assert not (tmp_path / "cluster.json").exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(addresses[0], timeout=1)
    assert launcher.is_closed == (fails == "starting workers")
