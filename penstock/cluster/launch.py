"""Starting the processes of a run: who does it, and doing it on this machine.

A worker is known by a name that its launcher gave it and that it says when it joins: process
numbers of several hosts may be equal.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.cluster.worker import NAME, TOKEN
from penstock.fabric.sockets import Address


@dataclass(frozen=True)
class Ended:
    """A worker that has ended: which it was, and how."""

    worker: str
    how: str


class Launcher(Protocol):
    """Starts workers, somewhere; called by one thread at a time, which it never makes wait."""

    def start(self) -> None:
        """Start one more worker, which joins by itself when it can; returns at once."""
        ...

    def poll(self) -> list[Ended]:
        """Return the workers that have ended since the last call."""
        ...

    def waits_for(self) -> str | None:
        """Say what workers that were started wait for before they can run; None for nothing."""
        ...

    def starves(self, worker: str) -> bool:
        """Tell whether a worker would run if it had a processor; False if nobody knows."""
        ...

    def end(self, worker: str) -> None:
        """End a worker that is of no use any more, whatever it does; one of others is let be."""
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
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0

    @property
    def pids(self) -> Mapping[str, int]:
        """The processes that run, by the names of the workers."""
        return {
            worker: process.pid
            for worker, process in self._processes.items()
            if process.poll() is None
        }

    def start(self) -> None:
        """Start one more worker."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._started += 1
        worker = f"worker-{self._started}"
        with self._log(worker).open("ab") as log:
            self._processes[worker] = subprocess.Popen(
                [sys.executable, "-m", "penstock.cluster.worker", *map(str, self._address)],
                env={**os.environ, TOKEN: self._token, NAME: worker},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt at the terminal is the trainer's to answer
            )

    def poll(self) -> list[Ended]:
        """Return the workers that have ended since the last call."""
        ended = [name for name, process in self._processes.items() if process.poll() is not None]
        return [Ended(name, self._how(name, self._processes.pop(name))) for name in ended]

    def waits_for(self) -> str | None:
        """Return nothing: a process of this machine runs at once."""
        return None

    def starves(self, worker: str) -> bool:
        """Tell whether a thread of it is ready to run, or is running; one that is stopped is not.

        While one is, those that wait for it (for the interpreter's lock) have not their turn.
        """
        process = self._processes.get(worker)
        return process is not None and any(state in "RD" for state in thread_states(process.pid))

    def end(self, worker: str) -> None:
        """End a worker, also one that stands still; `poll` will tell of it."""
        process = self._processes.get(worker)
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End all workers, at once: engines keep nothing, and shards have been told to close."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    def _log(self, worker: str) -> Path:
        return self._logs / f"{worker}.log"

    def _how(self, worker: str, process: subprocess.Popen[bytes]) -> str:
        code = process.returncode
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return (
            f"{worker} with pid {process.pid} ended {how}; what it said is in {self._log(worker)}"
        )


def thread_states(pid: int) -> list[str]:
    """Return the state of every thread of a process: R for one that runs or would, T for stopped.

    Empty for one that has ended, and where the system has no /proc.
    """
    states = []
    with contextlib.suppress(OSError):  # it may end meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                # The name of the program, in parentheses, may hold anything.
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states


class NoLauncher:
    """Starts nobody: workers are started by others, and join when they can."""

    def start(self) -> None:
        """Leave it to others to start one more."""

    def poll(self) -> list[Ended]:
        """Return nothing: who leaves is known by its link."""
        return []

    def waits_for(self) -> str | None:
        """Return nothing: it is said where the run listens."""
        return None

    def starves(self, worker: str) -> bool:
        """Return False: it is on another host."""
        return False

    def end(self, worker: str) -> None:
        """Leave it alone: it has been cut off, and may join again as a new engine."""

    def close(self) -> None:
        """Leave them alone: they end by themselves with the run."""
