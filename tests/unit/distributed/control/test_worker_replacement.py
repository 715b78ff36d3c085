"""How many workers run, and when no more are started."""

from __future__ import annotations

import time

import pytest

from penstock.distributed.control.worker_replacement import WorkerSupervisor
from penstock.distributed.control_messages import Role
from penstock.distributed.launchers.base import WorkerExit


class FakeLauncher:
    lacks: str | None = None
    starving: tuple[str, ...] = ()
    hosts: int | None = None

    def __init__(self) -> None:
        self.started = 0
        self.roles: list[str] = []
        self.ended: list[WorkerExit] = []
        self.killed: list[str] = []
        self.has_room = True

    def start(self, role: Role) -> str:
        if not self.has_room:
            raise OSError("no more processes")
        self.started += 1
        self.roles.append(role)
        return f"worker-{self.started}"

    def poll(self) -> list[WorkerExit]:
        ended, self.ended = self.ended, []
        return ended

    def starves(self, worker: str) -> bool:
        return worker in self.starving

    def waits_for(self) -> str | None:
        return self.lacks

    def end(self, worker: str) -> None:
        self.killed.append(worker)

    def close(self) -> None:
        raise AssertionError


class Made:
    def __init__(self, wanted: int) -> None:
        self.said: list[str] = []
        self.launcher = FakeLauncher()
        self.supervisor = WorkerSupervisor(
            self.launcher, lambda kind, text: self.said.append(kind), join_seconds=60.0
        )
        self.supervisor.fill({"engine": wanted})

    def lose(self, *workers: str, wanted: int) -> None:
        self.launcher.ended = [WorkerExit(worker, f"{worker} fell") for worker in workers]
        self.supervisor.replace({"engine": wanted})


def test_ended_worker_is_replaced_while_wanted():
    made = Made(4)
    made.supervisor.mark_ready("worker-1")
    made.lose("worker-1", wanted=4)
    assert made.launcher.started == 5
    made.supervisor.mark_ready("worker-2")
    made.lose("worker-2", wanted=3)  # three are left, and wanted
    assert made.launcher.started == 5
    made.supervisor.fill({"engine": 6})
    assert made.launcher.started == 8


def test_worker_that_does_not_join_in_time_is_replaced_once(monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    made = Made(3)
    made.supervisor.mark_joined("worker-1")
    made.supervisor.mark_joined("host7:12")  # which a user has started
    now += 50
    made.launcher.lacks = "no host has room"
    made.lose(wanted=3)
    now += 50
    made.launcher.lacks = None  # from now on they could have started
    made.lose(wanted=3)
    assert not made.launcher.killed
    now += 50
    made.supervisor.mark_joined("worker-2")
    made.lose(wanted=3)
    assert made.launcher.killed == ["worker-3"]
    assert made.launcher.started == 4
    made.lose("worker-3", wanted=3)  # its process has ended now, which is no news
    assert made.launcher.started == 4
    assert made.supervisor.given_up is None


def test_ended_worker_is_replaced_in_its_role():
    made = Made(0)
    wanted = {"shard": 2, "engine": 3}
    made.supervisor.fill(wanted)
    assert made.launcher.roles == ["shard"] * 2 + ["engine"] * 3
    made.launcher.ended = [WorkerExit("worker-2", "it fell"), WorkerExit("worker-4", "it fell")]
    made.supervisor.replace(wanted)
    assert made.launcher.roles[5:] == ["shard", "engine"]
    made.supervisor.mark_ready("worker-7")
    made.launcher.ended = [WorkerExit("worker-7", "it fell")]
    made.supervisor.replace({"shard": 3, "engine": 2})
    assert made.launcher.roles[7:] == ["shard"]


def test_no_worker_starts_after_three_failures():
    made = Made(4)
    made.lose("worker-1", "worker-2", wanted=4)
    assert made.launcher.started == 6
    assert made.supervisor.given_up is None
    made.lose("worker-3", wanted=4)
    assert made.launcher.started == 6
    assert made.supervisor.given_up == (
        "3 workers in a row ended before they could compute, or could not be started; worker-3 fell"
    )
    assert made.said[-1] == "not replaced"


@pytest.mark.parametrize("place", range(3))
def test_ready_worker_resets_failure_count(place):
    made = Made(4)
    for worker in range(place):
        made.lose(f"worker-{worker + 1}", wanted=4)
    made.supervisor.mark_ready("worker-4")
    made.lose("worker-4", "worker-5", "worker-6", wanted=4)
    assert made.supervisor.given_up is None


def test_failed_start_is_reported_and_retried_later(monkeypatch):
    made = Made(2)
    made.launcher.has_room = False
    made.supervisor.mark_ready("worker-1")
    made.lose("worker-1", wanted=2)
    assert made.said == ["worker ended", "not started"]
    made.launcher.has_room = True
    made.supervisor.replace({"engine": 2})  # at once it would be no better
    assert made.launcher.started == 2
    now = time.monotonic() + 6.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    made.supervisor.replace({"engine": 2})
    assert made.launcher.started == 3


def test_three_failed_starts_are_reported_and_end_retries():
    made = Made(0)
    made.launcher.has_room = False
    made.supervisor.fill({"engine": 5})
    assert made.said == ["not started"] * 3
    assert made.supervisor.given_up == (
        "3 workers in a row ended before they could compute, or could not be started; "
        "a worker could not be started: no more processes"
    )
    made.supervisor.replace({"engine": 5})
    made.supervisor.replace({"engine": 5})
    assert made.said[3:] == ["not replaced"]


def test_unchanged_wait_is_reported_once():
    made = Made(2)
    for lacks in ("2 find no room", "2 find no room", "1 finds no room", None, "1 finds no room"):
        made.launcher.lacks = lacks
        made.supervisor.replace({"engine": 2})
    assert made.said == ["waiting"] * 3
