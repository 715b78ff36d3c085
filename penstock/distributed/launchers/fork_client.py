"""The client of the fork server (`fork_server.py`): requests workers and observes their exits.

The fork server may be killed like any process. Its workers keep running, because the client holds a
`pidfd` of each worker. After the loss of the fork server the client still detects that a worker has
ended, but not its exit code.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.distributed.launchers.fork_server import MOST_BYTES

# Libraries that the trainer's process has imported to compile the program, and that a worker needs
# too. Modules of the user are excluded: their import may have side effects.
_LIBRARIES = frozenset(
    [
        *("penstock", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub"),
        *("numpy", "numba", "llvmlite", "scipy", "sympy", "mpmath", "networkx"),
        *("pydantic", "yaml", "xxhash"),
    ]
)
_IMPORT_SECONDS = 60.0  # seconds in which the fork server should finish its imports
_CLOSE_SECONDS = 5.0  # seconds in which the fork server should end all workers


@dataclass
class _Fork:
    """A requested worker; its process is known once the fork server has reported it."""

    pid: int | None = None
    file: int | None = None  # the pidfd; None also while this process has too many open files
    code: int | None = None  # the exit code, negative for a signal
    is_unwanted: bool = False  # `end` was called, perhaps before the process started
    is_gone: bool = False  # the process has ended, and no server is there to report its exit code


class ForkClient:
    """A fork server and its workers; no method blocks except `close`.

    Args:
        command: arguments of a worker, after the module's name.
        environment: of the workers.
        log: the log file of the fork server; the workers' logs are in the same folder.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, modules: list[str]
    ) -> None:
        self.is_ready = False
        self.unusable_because: str | None = None  # why this fork server, or another, cannot be used
        self._forks: dict[str, _Fork] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        try:
            with theirs, tempfile.TemporaryFile("w+") as module_names, log.open("ab") as output:
                module_names.write("\n".join(modules))
                module_names.seek(0)
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "penstock.distributed.launchers.fork_server"),
                        *(*command, str(theirs.fileno())),
                    ],
                    env=environment,
                    stdin=module_names,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            self._control.close()
            raise
        self._began = time.monotonic()

    @property
    def pid(self) -> int:
        """The process number of the fork server."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the fork server accepts requests."""
        return self._control.fileno() >= 0

    def start(self, worker: str, log: Path) -> bool:
        """Request a worker; False if the fork server accepts no request."""
        if not self._request(start=worker, log=str(log)):
            return False
        self._forks[worker] = _Fork()
        return True

    def poll(self) -> list[str]:
        """Process messages of the fork server; return the workers that will never start."""
        while self.is_running and (data := self._receive()) is not None:
            message, files = data
            if "ready" in message:
                self.is_ready = True
            elif "started" in message:
                fork = self._forks[message["started"]]
                fork.pid, fork.file = message["pid"], files[0] if files else None
                if fork.is_unwanted:
                    self.end(message["started"])
            elif "ended" in message:
                self._forks[message["ended"]].code = message["code"]
            else:
                self.unusable_because = str(message["unfit"])
                self._disconnect()
        is_late = time.monotonic() > self._began + _IMPORT_SECONDS
        if self.is_running and not self.is_ready and is_late:
            self.unusable_because = f"its imports took longer than {_IMPORT_SECONDS:.0f} s"
            self._disconnect()
        self._open_missing()
        if self.is_running:
            return []
        unstarted = {worker: fork for worker, fork in self._forks.items() if fork.pid is None}
        for worker in unstarted:
            del self._forks[worker]
        return [worker for worker, fork in unstarted.items() if not fork.is_unwanted]

    def _open_missing(self) -> None:
        """Open the pidfds that the kernel dropped: this process had too many open files."""
        for worker, fork in self._forks.items():
            if fork.pid is None or fork.file is not None or fork.code is not None:
                continue
            try:
                fork.file = os.pidfd_open(fork.pid)
            except ProcessLookupError:  # it has ended
                fork.is_gone = not self.is_running  # else the exit code is on its way
            except OSError:  # no room yet
                continue
            if fork.is_unwanted:
                self.end(worker)

    def pids(self) -> dict[str, int]:
        """Return the process numbers of the running workers, by worker name."""
        return {
            worker: fork.pid
            for worker, fork in self._forks.items()
            if fork.pid is not None and not _has_ended(fork)
        }

    def take_ended(self) -> list[tuple[str, int, int | None]]:
        """Return the workers that have ended, each once, with process number and exit code.

        The code is negative for a signal, and None if the fork server was lost.
        """
        ended = []
        for worker, fork in list(self._forks.items()):
            is_final = fork.code is not None or not self.is_running  # else the code follows
            if fork.pid is not None and is_final and _has_ended(fork):
                if fork.file is not None:
                    os.close(fork.file)
                del self._forks[worker]
                ended.append((worker, fork.pid, fork.code))
        return ended

    def end(self, worker: str) -> None:
        """Kill a worker; ignore a worker of another launcher."""
        fork = self._forks.get(worker)
        if fork is None:
            return
        fork.is_unwanted = True
        if fork.file is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fork.file, signal.SIGKILL)

    def close(self) -> None:
        """End the fork server and all workers."""
        for worker in list(self._forks):
            self.end(worker)
        self._request(end=True)
        with contextlib.suppress(subprocess.TimeoutExpired):  # the fork server is stopped
            self._process.wait(timeout=_CLOSE_SECONDS)
        self._disconnect()
        for fork in self._forks.values():
            if fork.file is not None:
                os.close(fork.file)
        self._forks.clear()

    def _request(self, **message: object) -> bool:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:  # the fork server has ended, or is stopped and reads nothing
            return False
        return True

    def _receive(self) -> tuple[dict, list[int]] | None:
        """Return the fork server's next message and file descriptors; None without a message."""
        try:
            data, files, _, _ = socket.recv_fds(
                self._control, MOST_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError:
            data, files = b"", []
        if not data:
            self._disconnect()
            return None
        return json.loads(data), files

    def _disconnect(self) -> None:
        self._control.close()
        self._process.kill()  # a running fork server has no client any more
        self._process.wait()


def _has_ended(fork: _Fork) -> bool:
    if fork.code is not None or fork.is_gone or fork.file is None:
        return fork.code is not None or fork.is_gone
    return bool(select.select([fork.file], [], [], 0)[0])


def needed_modules() -> list[str]:
    """Return the library modules that this process has imported, in the order of their import."""
    return [
        name
        for name in list(sys.modules)
        if name.partition(".")[0] in _LIBRARIES and "__main__" not in name
    ]
