"""The launcher of this machine when the system gives it no more processes; none is started here."""

from __future__ import annotations

import errno
import subprocess
from types import SimpleNamespace

from penstock.distributed.launchers import fork_client, local
from penstock.distributed.launchers.base import WorkerExit
from penstock.distributed.launchers.local import LocalLauncher


class LostForkServer:
    """A fork server that was killed before it started a requested worker."""

    is_running, unusable_because = False, None

    def __init__(self) -> None:
        self._unstarted = ["worker-1"]

    def poll(self) -> list[str]:
        unstarted, self._unstarted = self._unstarted, []
        return unstarted

    def take_ended(self) -> list[tuple[str, int, int | None]]:
        return [("worker-2", 7, -9)]


def test_worker_without_process_is_reported_as_ended(tmp_path, monkeypatch):
    """An error here would end the run, although its engines go on."""

    def refuse(*arguments, **options):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    # Only here: the tests' own processes are started meanwhile.
    limited = SimpleNamespace(Popen=refuse, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    for module in (local, fork_client):
        monkeypatch.setattr(module, "subprocess", limited)
    launcher = LocalLauncher(("127.0.0.1", 1), "token", tmp_path)
    launcher._fork_servers.append(LostForkServer())
    assert launcher.poll() == [
        WorkerExit(
            "worker-1", "worker-1 was not started: [Errno 11] Resource temporarily unavailable"
        ),
        WorkerExit(
            "worker-2",
            f"worker-2 with pid 7 ended by signal 9; its output is in {tmp_path / 'worker-2.log'}",
        ),
    ]
    assert launcher.fork_server is None
