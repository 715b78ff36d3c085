"""Starting the processes of a run on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.cluster.worker import TOKEN
from penstock.fabric.sockets import Address

_GRACE = 5.0  # seconds that a worker has to end by itself


@dataclass(frozen=True)
class Ended:
    """A worker that has ended: which it was, and how."""

    pid: int
    how: str


class Launcher(Protocol):
    """Starts workers, somewhere."""

    def start(self) -> None:
        """Start one more worker, which joins by itself when it can; returns at once."""
        ...

    def poll(self) -> list[Ended]:
        """Return the workers that have ended since the last call."""
        ...

    def end(self, pid: int) -> None:
        """End a worker that is of no use any more, whatever it does."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class LocalLauncher:
    """Starts workers as processes of this machine.

    Args:
        address: where the conductor's process listens.
        token: of the run; it goes to the workers through their environment, which other users
            cannot read.
        logs: the folder into which each writes what it has to say.
    """

    def __init__(self, address: Address, token: str, logs: Path) -> None:
        self._address, self._token, self._logs = address, token, logs
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started = 0

    @property
    def pids(self) -> Sequence[int]:
        """The processes that run."""
        return [process.pid for process in self._processes if process.poll() is None]

    def start(self) -> None:
        """Start one more worker."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._started += 1
        with (self._logs / f"worker-{self._started}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cluster.worker", *map(str, self._address)],
                env={**os.environ, TOKEN: self._token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt at the terminal is the trainer's to answer
            )
        self._processes.append(process)

    def poll(self) -> list[Ended]:
        """Return the workers that have ended since the last call."""
        ended = [process for process in self._processes if process.poll() is not None]
        self._processes = [process for process in self._processes if process not in ended]
        return [Ended(process.pid, _how(process)) for process in ended]

    def end(self, pid: int) -> None:
        """End a worker, also one that stands still; `poll` will tell of it."""
        for process in self._processes:
            if process.pid == pid:
                process.kill()

    def close(self) -> None:
        """End all workers: they end by themselves with their links, or are made to."""
        deadline = time.monotonic() + _GRACE
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # one that was stopped must hear of it
                process.send_signal(signal.SIGCONT)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.05, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        self._processes.clear()


def _how(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return f"the worker with pid {process.pid} ended {how}"
