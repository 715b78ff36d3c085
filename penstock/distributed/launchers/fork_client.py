"""Workers that are forked from a template (`fork_server.py`): asking for them, and hearing of them.

The template may be killed as any process may. Workers that it has forked go on, since each is held
by a file that stands for the process (`pidfd`); how they end is then not known, but that they do.
"""

from __future__ import annotations

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

# Of what the trainer's process has imported to compile the same program, what a worker will need:
# no module of the user's, which may do anything when it is imported.
_LIBRARIES = frozenset(
    [
        *("penstock", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub"),
        *("numpy", "numba", "llvmlite", "scipy", "sympy", "mpmath", "networkx"),
        *("pydantic", "yaml", "xxhash"),
    ]
)
_PATIENCE = 60.0  # seconds in which a template should have imported all
_LEAVE = 5.0  # seconds in which it should have ended all workers


@dataclass
class _Fork:
    """A worker that was asked for: its process, once it is known."""

    pid: int | None = None
    file: int | None = None  # stands for the process
    code: int | None = None  # the exit code, less than 0 for a signal
    is_unwanted: bool = False  # before it was there


class ForkClient:
    """A template and its workers; its methods never wait, but for `close`.

    Args:
        command: of a worker, behind the module's name.
        environment: of the workers.
        log: what the template has to say; workers write beside it.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, modules: list[str]
    ) -> None:
        self.is_ready = False
        self.why_not: str | None = None  # why it is of no use and another would be none
        self._forks: dict[str, _Fork] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs, tempfile.TemporaryFile("w+") as names, log.open("ab") as says:
            names.write("\n".join(modules))
            names.seek(0)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "penstock.distributed.launchers.fork_server"),
                    *(*command, str(theirs.fileno())),
                ],
                env=environment,
                stdin=names,
                stdout=says,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._began = time.monotonic()

    @property
    def pid(self) -> int:
        """The template's process."""
        return self._process.pid

    @property
    def is_there(self) -> bool:
        """Whether workers can be asked for."""
        return self._control.fileno() >= 0

    def start(self, worker: str, log: Path) -> bool:
        """Ask for a worker; False if the template cannot be asked."""
        if not self._ask(start=worker, log=str(log)):
            return False
        self._forks[worker] = _Fork()
        return True

    def look(self) -> list[str]:
        """Hear what has become of workers; return those that will never be there."""
        while self.is_there and (said := self._hear()) is not None:
            what, files = said
            if "ready" in what:
                self.is_ready = True
            elif "started" in what:
                fork = self._forks[what["started"]]
                fork.pid, (fork.file,) = what["pid"], files
                if fork.is_unwanted:
                    self.end(what["started"])
            elif "ended" in what:
                self._forks[what["ended"]].code = what["code"]
            else:
                self.why_not = str(what["unfit"])
                self._let_go()
        if self.is_there and not self.is_ready and time.monotonic() > self._began + _PATIENCE:
            self.why_not = f"it has not imported all in {_PATIENCE:.0f} s"
            self._let_go()
        if self.is_there:
            return []
        never = {worker: fork for worker, fork in self._forks.items() if fork.pid is None}
        for worker in never:
            del self._forks[worker]
        return [worker for worker, fork in never.items() if not fork.is_unwanted]

    def pids(self) -> dict[str, int]:
        """Return the processes that run, by the names of the workers."""
        return {
            worker: fork.pid
            for worker, fork in self._forks.items()
            if fork.pid is not None and not _has_ended(fork)
        }

    def take_ended(self) -> list[tuple[str, int, int | None]]:
        """Return the workers that have ended, each with its process and exit code, once.

        The code is less than 0 for a signal, and None if nobody is there who would know.
        """
        ended = []
        for worker, fork in list(self._forks.items()):
            knows = fork.code is not None or not self.is_there  # else it will say so
            if fork.pid is not None and knows and _has_ended(fork):
                assert fork.file is not None
                os.close(fork.file)
                del self._forks[worker]
                ended.append((worker, fork.pid, fork.code))
        return ended

    def end(self, worker: str) -> None:
        """End a worker, whatever it does; one of others is let be."""
        fork = self._forks.get(worker)
        if fork is None:
            return
        fork.is_unwanted = True
        if fork.file is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fork.file, signal.SIGKILL)

    def close(self) -> None:
        """End the template and all workers."""
        for worker in list(self._forks):
            self.end(worker)
        self._ask(end=True)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it stands still
            self._process.wait(timeout=_LEAVE)
        self._let_go()
        for fork in self._forks.values():
            if fork.file is not None:
                os.close(fork.file)
        self._forks.clear()

    def _ask(self, **what: object) -> bool:
        try:
            self._control.send(json.dumps(what).encode())
        except OSError:  # gone, or it stands still and hears nothing
            return False
        return True

    def _hear(self) -> tuple[dict, list[int]] | None:
        """Return what the template says next, and files; None if it says nothing."""
        try:
            said, files, _, _ = socket.recv_fds(
                self._control, MOST_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except OSError:
            said, files = b"", []
        if not said:
            self._let_go()
            return None
        return json.loads(said), files

    def _let_go(self) -> None:
        self._control.close()
        self._process.kill()  # if it is there still, nobody talks to it any more
        self._process.wait()


def _has_ended(fork: _Fork) -> bool:
    if fork.code is not None or fork.file is None:
        return fork.code is not None
    return bool(select.select([fork.file], [], [], 0)[0])


def needed_modules() -> list[str]:
    """Return the modules of libraries that this process has imported, in that order."""
    return [
        name
        for name in list(sys.modules)
        if name.partition(".")[0] in _LIBRARIES and "__main__" not in name
    ]
