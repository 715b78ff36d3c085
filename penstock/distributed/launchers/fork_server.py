"""The fork server: a process that has imported a worker's libraries and forks workers on request.

    python -m penstock.distributed.launchers.fork_server HOST PORT CONTROL

Most of a worker's start time is the import of libraries; a forked worker has the libraries at once.
The fork server must have no threads of libraries, because a fork would lack these threads. So this
process computes nothing. If an import has started threads nevertheless, this process reports the
threads and ends. (OpenBLAS starts threads when it is loaded, and restarts them after a fork by
itself.) A worker on a GPU is never forked: a GPU driver does not survive a fork.

The modules to import are read from standard input, one name a line. `CONTROL` is the number of an
inherited socket, which carries requests and replies (`fork_client.py` is the other end). When the
socket is closed, the workers and this process end.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any

MOST_BYTES = 1 << 16  # of one request or one reply
_CLOSE_SECONDS = 15.0  # in which workers may end by themselves after the end of the trainer


def main() -> None:
    """Run the fork server; in a forked process, run the worker."""
    host, port, control = sys.argv[1:]
    token = os.environ.pop("PENSTOCK_TOKEN")
    names = sys.stdin.read().split()
    request = _ForkServer(socket.socket(fileno=int(control)), names).serve()
    if request is None:
        return
    os.environ["PENSTOCK_TOKEN"], os.environ["PENSTOCK_WORKER"] = token, request["start"]
    sys.argv[1:] = [host, port]
    from penstock.distributed.worker.main import main as work

    work()


class _ForkServer:
    """Forks workers and reports their exits."""

    def __init__(self, control: socket.socket, names: Iterable[str]) -> None:
        self._control = control
        self._workers: dict[int, tuple[str, int]] = {}  # name and pid of a worker, by its pidfd
        _import(("numpy", "scipy.linalg"))  # each loads an OpenBLAS
        before = _threads()
        _import(names)
        gc.collect()
        gc.freeze()  # a collection in a fork would write to, and so copy, these pages
        if (more := _threads() - before) > 0:
            self._send(unfit=f"its imports started {more} threads")
        else:
            self._send(ready=os.getpid())

    def serve(self) -> dict[str, Any] | None:
        """Serve requests until the socket is closed; in a fork, return the worker's request."""
        while True:
            control = self._control.fileno()
            ready, _, _ = select.select([control, *self._workers], [], [])
            for file in ready:
                if file != control:
                    self._reap(file)
                    continue
                request = self._receive()
                if "start" not in request:
                    self._end_all(0 if "end" in request else _CLOSE_SECONDS)
                    return None
                if self._fork(request) == 0:
                    return request

    def _receive(self) -> dict[str, Any]:
        """Return the next request; an empty request when the socket is closed."""
        with contextlib.suppress(ConnectionError):
            if data := self._control.recv(MOST_BYTES):
                return json.loads(data)
        return {}

    def _fork(self, request: dict[str, Any]) -> int:
        pid = os.fork()
        if pid == 0:
            self._detach(request["log"])
        else:
            file = os.pidfd_open(pid)
            self._workers[file] = request["start"], pid
            self._send([file], started=request["start"], pid=pid)
        return pid

    def _detach(self, log: str) -> None:
        """Release all resources of the fork server except its imports."""
        self._control.close()
        for file in self._workers:
            os.close(file)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        for number, file in enumerate((nothing, output, output)):
            os.dup2(file, number)
        os.close(nothing)
        os.close(output)

    def _reap(self, file: int) -> None:
        worker, pid = self._workers.pop(file)
        _, status = os.waitpid(pid, 0)
        os.close(file)
        self._send(ended=worker, code=os.waitstatus_to_exitcode(status))

    def _send(self, files: list[int] | None = None, **message: Any) -> None:
        with contextlib.suppress(ConnectionError):  # the client is gone; `serve` detects it
            socket.send_fds(self._control, [json.dumps(message).encode()], files or [])

    def _end_all(self, seconds: float) -> None:
        """Wait so many seconds for the workers to end, then kill the rest."""
        deadline = time.monotonic() + seconds
        while self._workers:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                for _, pid in self._workers.values():
                    os.kill(pid, signal.SIGKILL)
            ready, _, _ = select.select([*self._workers], [], [], max(0.1, remaining))
            for file in ready:
                self._reap(file)


def _import(names: Iterable[str]) -> None:
    for name in names:
        # A module that the trainer's process could import may depend on that process's state.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


if __name__ == "__main__":
    main()
