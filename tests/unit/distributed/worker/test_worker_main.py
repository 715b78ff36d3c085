"""How a worker's process is seen from outside, and when it ends by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fake_workers import TOKEN
from waiting import wait_until

from penstock.distributed.launchers.local import thread_states
from penstock.distributed.transport import Endpoint
from penstock.distributed.worker import main as worker_main
from penstock.distributed.worker.main import Worker
from penstock.errors import ClusterError


def test_runnable_process_is_distinguished_from_sleeping_or_stopped(tmp_path):
    spin = "while True: pass"
    for code, states in ((spin, "R"), ("import time; time.sleep(60)", "S")):
        with subprocess.Popen([sys.executable, "-c", code]) as process:
            wait_until(lambda p=process, s=states: thread_states(p.pid) == [s])
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda p=process: thread_states(p.pid) == ["T"])
            process.kill()
        assert thread_states(process.pid) == []


def test_worker_disconnected_before_assignment_reports_error():
    run = Endpoint(
        TOKEN,
        "127.0.0.1",
        on_connection_end=lambda connection, error: None,
        on_new_peer=lambda connection, message: connection.close(),
        on_failure=lambda error: None,
    )
    run.start()
    try:
        with pytest.raises(ClusterError, match="the run closed the connection before it assigned"):
            Worker(run.address, TOKEN).serve()
    finally:
        run.close()


def test_interrupted_worker_prints_no_traceback(monkeypatch, capsys):
    def serve() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_main, "Worker", lambda *_: SimpleNamespace(serve=serve))
    monkeypatch.setattr(sys, "argv", ["worker", "127.0.0.1", "4000"])
    monkeypatch.setenv(worker_main.TOKEN, TOKEN)
    with pytest.raises(SystemExit) as ended:
        worker_main.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "worker: stopped by Ctrl-C; the run continues without it\n"


@pytest.mark.parametrize("arguments", [["70000"], ["-1"], ["4000", "--port", "70000"]])
def test_impossible_port_is_refused(arguments, monkeypatch, capsys):
    """The system would take the rest of a division by 65,536, and connect elsewhere."""
    monkeypatch.setattr(sys, "argv", ["worker", "127.0.0.1", *arguments])
    monkeypatch.setenv(worker_main.TOKEN, TOKEN)
    with pytest.raises(SystemExit) as ended:
        worker_main.main()
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err
