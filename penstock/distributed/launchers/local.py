"""Starting the processes of a run: who does it, and doing it on this machine.

A worker is known by a name that its launcher gave it and that it says when it joins: process
numbers of several hosts may be equal. On this machine workers are forked from a process that has
imported all already; without one, and on a GPU, they are started from nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from penstock.distributed.control_messages import Role
from penstock.distributed.launchers.base import WorkerExit
from penstock.distributed.launchers.fork_client import ForkClient, needed_modules
from penstock.distributed.transport import Address
from penstock.distributed.worker import NAME, TOKEN

log = logging.getLogger("penstock.distributed")

_MOST_TEMPLATES = 3  # that are lost, until no more are started


class LocalLauncher:
    """Starts workers as processes of this machine.

    Args:
        address: where the coordinator's process listens.
        token: of the run; it goes to the workers through their environment, which other users
            cannot read.
        logs: the folder into which each writes what it has to say.
        forks: whether workers may be forked; what uses a GPU may not.
    """

    def __init__(self, address: Address, token: str, logs: Path, *, forks: bool = True) -> None:
        self._address, self._token, self._logs = address, token, logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._may_fork = forks and hasattr(os, "pidfd_open")
        self._templates: list[
            ForkClient
        ] = []  # those before the last are gone, but not their workers
        self._started = 0

    @property
    def pids(self) -> Mapping[str, int]:
        """The processes that run, by the names of the workers."""
        running = {
            worker: process.pid
            for worker, process in self._processes.items()
            if process.poll() is None
        }
        for template in self._templates:
            running |= template.pids()
        return running

    @property
    def template(self) -> ForkClient | None:
        """From which workers are forked, if they are."""
        return self._templates[-1] if self._templates and self._templates[-1].is_there else None

    def start(self, role: Role) -> str:
        """Start one more worker; on this machine any of them may be an engine or a shard."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._started += 1
        worker = f"worker-{self._started}"
        if not self._templates and self._may_fork:
            self._make_template()
        template = self.template
        # The first workers wait for the first template: both import the same.
        is_of_use = template is not None and (template.is_ready or len(self._templates) == 1)
        if template is None or not is_of_use or not template.start(worker, self._log(worker)):
            self._start_afresh(worker)
        return worker

    def _make_template(self) -> None:
        name = f"template-{len(self._templates) + 1}"
        where, modules = [str(part) for part in self._address], needed_modules()
        template = ForkClient(where, {**os.environ, TOKEN: self._token}, self._log(name), modules)
        self._templates.append(template)

    def _start_afresh(self, worker: str) -> None:
        with self._log(worker).open("ab") as says:
            self._processes[worker] = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "penstock.distributed.worker.main",
                    *map(str, self._address),
                ],
                env={**os.environ, TOKEN: self._token, NAME: worker},
                stdin=subprocess.DEVNULL,
                stdout=says,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt at the terminal is the trainer's to answer
            )

    def poll(self) -> list[WorkerExit]:
        """Return the workers that have ended since the last call."""
        ended = []
        for name in [name for name, p in self._processes.items() if p.poll() is not None]:
            process = self._processes.pop(name)
            ended.append(WorkerExit(name, self._how(name, process.pid, process.returncode)))
        for template in self._templates:
            for worker in template.look():
                self._start_afresh(worker)
            ended += [
                WorkerExit(n, self._how(n, pid, code)) for n, pid, code in template.take_ended()
            ]
        if self._templates and not self._templates[-1].is_there:
            self._replace_template(self._templates[-1])
        return ended

    def _replace_template(self, lost: ForkClient) -> None:
        if not self._may_fork:
            return
        if lost.why_not is not None or len(self._templates) >= _MOST_TEMPLATES:
            self._may_fork = False
            log.info("workers are not forked any more: %s", lost.why_not or "templates are lost")
        else:
            self._make_template()

    def waits_for(self) -> str | None:
        """Return nothing: a process of this machine runs at once."""
        return None

    def starves(self, worker: str) -> bool:
        """Tell whether a thread of it is ready to run, or is running."""
        pid = self.pids.get(worker)
        return pid is not None and would_run(pid)

    def end(self, worker: str) -> None:
        """End a worker, also one that stands still; `poll` will tell of it."""
        if worker in self._processes:
            self._processes[worker].kill()
        for template in self._templates:
            template.end(worker)

    def close(self) -> None:
        """End all workers, at once: engines keep nothing, and shards have been told to close."""
        for process in self._processes.values():
            process.kill()
        for template in self._templates:
            template.close()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        self._templates.clear()

    def _log(self, worker: str) -> Path:
        return self._logs / f"{worker}.log"

    def _how(self, worker: str, pid: int, code: int | None) -> str:
        how = f"with exit code {code}"
        if code is None:
            how = "and nobody knows how"
        elif code < 0:
            how = f"by signal {-code}"
        return f"{worker} with pid {pid} ended {how}; what it said is in {self._log(worker)}"


def would_run(pid: int) -> bool:
    """Tell whether a thread of a process is ready to run, or is running; none of a stopped one is.

    While one is, those that wait for it (for the interpreter's lock) have not their turn.
    """
    return any(state in "RD" for state in thread_states(pid))


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
