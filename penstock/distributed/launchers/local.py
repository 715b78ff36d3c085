"""The launcher of worker processes on this machine.

A worker is identified by a name that its launcher has assigned and that the worker sends when it
joins: process numbers of several hosts may be equal. Workers on CPUs are forked by a fork server,
which has imported their libraries. Without a fork server, and on a GPU, workers are started as new
processes.
"""

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

_MOST_FORK_SERVERS = 3  # after so many lost fork servers no other is started


class LocalLauncher:
    """Starts workers as processes of this machine.

    Args:
        address: where the coordinator's process listens.
        token: of the run; workers receive it through their environment, which other users
            cannot read.
        logs: the folder of the workers' log files.
        forks: whether workers may be forked; a worker that uses a GPU may not.
    """

    def __init__(self, address: Address, token: str, logs: Path, *, forks: bool = True) -> None:
        self._address, self._token, self._logs = address, token, logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._may_fork = forks and hasattr(os, "pidfd_open")
        # All fork servers but the last have ended; their workers may still run.
        self._fork_servers: list[ForkClient] = []
        self._started = 0

    @property
    def pids(self) -> Mapping[str, int]:
        """The process numbers of the running workers, by worker name."""
        running = {
            worker: process.pid
            for worker, process in self._processes.items()
            if process.poll() is None
        }
        for fork_server in self._fork_servers:
            running |= fork_server.pids()
        return running

    @property
    def fork_server(self) -> ForkClient | None:
        """The fork server of the workers, if workers are forked."""
        latest = self._fork_servers[-1] if self._fork_servers else None
        return latest if latest is not None and latest.is_running else None

    def start(self, role: Role) -> str:
        """Start one more worker; on this machine every worker can be an engine or a shard."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._started += 1
        worker = f"worker-{self._started}"
        if not self._fork_servers and self._may_fork:
            self._start_fork_server()
        fork_server = self.fork_server
        # The first workers wait for the first fork server: without it they would import the same
        # libraries.
        is_first = len(self._fork_servers) == 1
        can_fork = fork_server is not None and (fork_server.is_ready or is_first)
        if fork_server is None or not can_fork or not fork_server.start(worker, self._log(worker)):
            self._start_process(worker)
        return worker

    def _start_fork_server(self) -> None:
        name = f"fork-server-{len(self._fork_servers) + 1}"
        where, modules = [str(part) for part in self._address], needed_modules()
        environment = {**os.environ, TOKEN: self._token}
        fork_server = ForkClient(where, environment, self._log(name), modules)
        self._fork_servers.append(fork_server)

    def _start_process(self, worker: str) -> None:
        with self._log(worker).open("ab") as output:
            self._processes[worker] = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "penstock.distributed.worker.main",
                    *map(str, self._address),
                ],
                env={**os.environ, TOKEN: self._token, NAME: worker},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt at the terminal is for the trainer
            )

    def poll(self) -> list[WorkerExit]:
        """Return the workers that have ended since the last call."""
        ended = []
        for name in [name for name, p in self._processes.items() if p.poll() is not None]:
            process = self._processes.pop(name)
            ended.append(WorkerExit(name, self._how(name, process.pid, process.returncode)))
        for fork_server in self._fork_servers:
            for worker in fork_server.poll():
                try:
                    self._start_process(worker)
                except OSError as error:  # the caller decides whether to start another
                    ended.append(WorkerExit(worker, f"{worker} was not started: {error}"))
            ended += [
                WorkerExit(n, self._how(n, pid, code)) for n, pid, code in fork_server.take_ended()
            ]
        if self._fork_servers and not self._fork_servers[-1].is_running:
            self._replace_fork_server(self._fork_servers[-1])
        return ended

    def _replace_fork_server(self, lost: ForkClient) -> None:
        if not self._may_fork:
            return
        if lost.unusable_because is not None or len(self._fork_servers) >= _MOST_FORK_SERVERS:
            self._may_fork = False
            reason = lost.unusable_because or f"{_MOST_FORK_SERVERS} fork servers were lost"
            log.info("the fork server is no longer used, new workers start slower: %s", reason)
            return
        try:
            self._start_fork_server()
        except OSError as error:
            self._may_fork = False
            log.info("no fork server could be started, new workers start slower: %s", error)

    def waits_for(self) -> str | None:
        """Return None: a process of this machine runs at once."""
        return None

    @property
    def hosts(self) -> int | None:
        """One: all workers are on this host."""
        return 1

    def starves(self, worker: str) -> bool:
        """Tell whether a thread of the worker is runnable."""
        pid = self.pids.get(worker)
        return pid is not None and would_run(pid)

    def end(self, worker: str) -> None:
        """Kill a worker, even a stopped one; `poll` reports its exit."""
        if worker in self._processes:
            self._processes[worker].kill()
        for fork_server in self._fork_servers:
            fork_server.end(worker)

    def close(self) -> None:
        """Kill all workers at once: engines keep no state, and shards have been asked to close."""
        for process in self._processes.values():
            process.kill()
        for fork_server in self._fork_servers:
            fork_server.close()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        self._fork_servers.clear()

    def _log(self, worker: str) -> Path:
        return self._logs / f"{worker}.log"

    def _how(self, worker: str, pid: int, code: int | None) -> str:
        how = f"with exit code {code}"
        if code is None:
            how = "with an unknown exit code"
        elif code < 0:
            how = f"by signal {-code}"
        return f"{worker} with pid {pid} ended {how}; its output is in {self._log(worker)}"


def would_run(pid: int) -> bool:
    """Tell whether a thread of a process is runnable; False for a stopped process.

    While one thread is runnable, the threads that wait for it (for the interpreter's lock) cannot
    proceed.
    """
    return any(state in "RD" for state in thread_states(pid))


def thread_states(pid: int) -> list[str]:
    """Return the state of every thread of a process: R for a runnable thread, T for a stopped one.

    Empty for a process that has ended, and on a system without /proc.
    """
    states = []
    with contextlib.suppress(OSError):  # the thread may end meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                # The program name, in parentheses, may contain any character.
                states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return states
