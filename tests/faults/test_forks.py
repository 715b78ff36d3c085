"""Workers that are forked: how they end is known, whoever is killed, and none is left behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start
from waiting import wait_until

from penstock.distributed.launchers import local
from penstock.distributed.launchers.local import LocalLauncher
from penstock.errors import ClusterError

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd here")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # an orphan may have nobody here who takes note of its end


@pytest.fixture
def door():
    """Where workers wait for an answer, for seconds or until it is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def deaf(door):
    return door.getsockname()


@pytest.fixture
def launcher(deaf, tmp_path, monkeypatch):
    """One whose templates import nothing, and so are there at once."""
    monkeypatch.setattr(local, "needed_modules", list)
    launcher = LocalLauncher(deaf, "token", tmp_path)
    yield launcher
    launcher.close()


def polled(launcher: LocalLauncher) -> list:
    return wait_until(launcher.poll)


@pytest.mark.long
def test_killed_or_ended_worker_is_reported_once(launcher):
    for _ in range(3):
        launcher.start("engine")
    wait_until(lambda: not launcher.poll() and len(launcher.pids) == 3)
    pids = dict(launcher.pids)
    fork_server = launcher.fork_server.pid
    for pid in pids.values():  # they are the template's children, each in a session of its own
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        assert status.split()[1] == str(fork_server)
        wait_until(lambda pid=pid: os.getsid(pid) == pid)  # it has only just been forked
    os.kill(pids["worker-2"], signal.SIGKILL)
    (ended,) = polled(launcher)
    assert ended.worker == "worker-2"
    assert f"worker-2 with pid {pids['worker-2']} ended by signal 9" in ended.how
    os.kill(pids["worker-1"], signal.SIGSTOP)
    launcher.end("worker-1")
    launcher.end("worker-7")  # of others
    (ended,) = polled(launcher)
    assert ended.worker == "worker-1"
    assert "by signal 9" in ended.how
    assert set(launcher.pids) == {"worker-3"}
    assert launcher.poll() == []
    launcher.start("engine")
    launcher.end("worker-4")  # before anybody knows its process
    assert [ended.worker for ended in polled(launcher)] == ["worker-4"]
    launcher.close()
    assert not any(is_running(pid) for pid in (*pids.values(), fork_server))


@pytest.mark.long
def test_exited_worker_is_reported_with_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "needed_modules", list)
    with socket.socket() as deaf:  # nobody listens, and nobody else comes to
        deaf.bind(("127.0.0.1", 0))
        launcher = LocalLauncher(deaf.getsockname(), "token", tmp_path)
        try:
            launcher.start("engine")
            (ended,) = polled(launcher)
            assert f"ended with exit code {ClusterError.exit_code}" in ended.how
            assert "Connection refused" in (tmp_path / "worker-1.log").read_text()
        finally:
            launcher.close()


@pytest.mark.long
def test_killed_fork_server_keeps_workers_and_is_replaced(launcher, monkeypatch):
    launcher.start("engine")
    wait_until(lambda: not launcher.poll() and launcher.pids)
    first, (survivor,) = launcher.fork_server.pid, launcher.pids.values()
    os.kill(first, signal.SIGSTOP)
    launcher.start("engine")  # which this one will never do
    os.kill(first, signal.SIGKILL)
    # It is started from nothing.
    wait_until(lambda: not launcher.poll() and len(launcher.pids) == 2)
    assert set(launcher._processes) == {"worker-2"}
    assert launcher.pids["worker-1"] == survivor
    assert is_running(survivor)
    wait_until(lambda: not launcher.poll() and launcher.fork_server.is_ready)
    assert launcher.fork_server.pid != first
    launcher.start("engine")
    wait_until(lambda: not launcher.poll() and len(launcher.pids) == 3)
    assert set(launcher._processes) == {"worker-2"}
    os.kill(survivor, signal.SIGKILL)
    (ended,) = polled(launcher)
    assert f"worker-1 with pid {survivor} ended with an unknown exit code" in ended.how
    pids = list(launcher.pids.values())
    for _ in range(local._MOST_FORK_SERVERS):
        if launcher.fork_server is not None:
            os.kill(launcher.fork_server.pid, signal.SIGKILL)
            wait_until(lambda pid=launcher.fork_server.pid: not is_running(pid))
            launcher.poll()
    assert launcher.fork_server is None  # enough of them
    launcher.start("engine")
    assert "worker-4" in launcher._processes
    pids.append(launcher.pids["worker-4"])
    launcher.close()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_stopped_fork_server_does_not_block_close(launcher, monkeypatch):
    monkeypatch.setattr("penstock.distributed.launchers.fork_client._CLOSE_SECONDS", 0.2)
    launcher.start("engine")
    wait_until(lambda: not launcher.poll() and launcher.pids)
    (pid,), fork_server = launcher.pids.values(), launcher.fork_server.pid
    os.kill(fork_server, signal.SIGSTOP)
    launcher.close()
    wait_until(lambda: not is_running(pid) and not is_running(fork_server))


def test_fork_server_with_threads_is_not_used(deaf, tmp_path, monkeypatch):
    """A fork would lack them, and wait for them for ever."""
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
    (tmp_path / "starts_a_thread.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(local, "needed_modules", lambda: ["starts_a_thread"])
    launcher = LocalLauncher(deaf, "token", tmp_path)
    try:
        launcher.start("engine")
        wait_until(lambda: not launcher.poll() and launcher.pids)
        assert list(launcher._processes) == ["worker-1"]
        assert launcher.fork_server is None
        assert launcher._fork_servers[0].unusable_because == "its imports started 1 threads"
    finally:
        launcher.close()


def test_workers_start_as_new_processes_without_fork(deaf, tmp_path):
    launcher = LocalLauncher(deaf, "token", tmp_path, forks=False)
    try:
        launcher.start("engine")
        assert list(launcher._processes) == ["worker-1"]
        assert launcher.fork_server is None
    finally:
        launcher.close()


TRAINER = (
    "import os, sys, time\n"
    "from penstock.distributed.launchers.fork_client import ForkClient\n"
    "from pathlib import Path\n"
    "logs = Path(sys.argv[3])\n"
    "environment = {**os.environ, 'PENSTOCK_TOKEN': 'token'}\n"
    "forks = ForkClient(sys.argv[1:3], environment, logs / 'template.log', [])\n"
    "forks.start('worker-1', logs / 'worker-1.log')\n"
    "while not forks.pids():\n"
    "    forks.poll()\n"
    "    time.sleep(0.01)\n"
    "print(forks.pid, *forks.pids().values(), flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.mark.long
def test_killed_trainer_leaves_no_processes(door, tmp_path):
    command = [sys.executable, "-c", TRAINER, *map(str, door.getsockname()), str(tmp_path)]
    trainer = warm_start.Popen(command, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pids = [int(word) for word in trainer.stdout.readline().split()]
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    door.close()  # as its own would
    assert len(pids) == 2
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_fork_server_imports_libraries_only():
    names = local.needed_modules()
    assert "penstock.distributed.worker.main" in names
    assert "torch" in names
    assert __name__ not in names
    assert not any(name.startswith(("pytest", "__main__", "penstock.__main__")) for name in names)


def leave_no_room(patched: pytest.MonkeyPatch, *, opens: bool) -> None:
    """Let this process have no room for descriptors that it receives, nor (unless it `opens` them)
    for others of processes."""
    receive = socket.recv_fds

    def receive_without_room(*arguments):
        data, files, flags, address = receive(*arguments)
        for file in files:
            os.close(file)
        return data, [], flags, address

    def no_room(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    patched.setattr(socket, "recv_fds", receive_without_room)
    if not opens:
        patched.setattr(os, "pidfd_open", no_room)


def test_worker_whose_process_descriptor_did_not_arrive_is_known_nevertheless(
    launcher, monkeypatch
):
    """The kernel drops a descriptor for which this process has no room."""
    with monkeypatch.context() as patched:
        leave_no_room(patched, opens=True)
        for _ in range(2):
            launcher.start("engine")
        wait_until(lambda: not launcher.poll() and len(launcher.pids) == 2)
        pids = dict(launcher.pids)
        launcher.end("worker-1")
        (ended,) = polled(launcher)
        assert f"worker-1 with pid {pids['worker-1']} ended by signal 9" in ended.how
    launcher.close()
    assert not any(is_running(pid) for pid in pids.values())


def test_worker_without_process_descriptor_may_be_ended_after_room_is_found(launcher, monkeypatch):
    with monkeypatch.context() as patched:
        leave_no_room(patched, opens=False)
        launcher.start("engine")
        wait_until(lambda: not launcher.poll() and launcher.pids)
        launcher.end("worker-1")
        assert launcher.poll() == []
    (ended,) = polled(launcher)
    assert "worker-1" in ended.how
    assert "by signal 9" in ended.how


def test_end_of_a_worker_without_descriptor_is_known_though_its_server_is_lost(
    launcher, monkeypatch
):
    with monkeypatch.context() as patched:
        leave_no_room(patched, opens=False)
        launcher.start("engine")
        wait_until(lambda: not launcher.poll() and launcher.pids)
        pid = launcher.pids["worker-1"]
        launcher.fork_server._disconnect()  # which ends it
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
    (ended,) = polled(launcher)
    assert "worker-1" in ended.how
