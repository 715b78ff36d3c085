"""Loops that take turns step by step, each in a process of its own.

A process stands still while it is not its turn: threads that read ahead, write behind or spin would
disturb the others, and what they get done between the turns would not be in their loop's seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_ANSWER = "answer "
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


class WorkerEnded(RuntimeError):
    """A worker's process ended before it answered; what it printed says why."""


def peak_rss_bytes() -> int:
    """Return the most memory that this process has had resident.

    On Linux that is `VmHWM`: `ru_maxrss` outlives `exec`, and so may be the parent's.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _peak_rss() -> dict[str, Any]:
    return {"peak_rss_bytes": peak_rss_bytes()}


class Worker:
    """One loop in its own process, which does a step when it is told to and waits otherwise.

    Args:
        job: a dataclass of plain data, from which `script` makes the loop.
        script: is run with `--worker` and the job in JSON; it is to call `serve`.
        python: the interpreter.
        environment: variables beside those of this process.

    Attributes:
        losses: of all steps so far.
    """

    def __init__(
        self,
        job: Any,
        script: str,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.losses: list[float] = []
        self._process = subprocess.Popen(
            [python, script, "--worker", json.dumps(dataclasses.asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def step(self) -> float:
        """Do one step and return its seconds."""
        answer = self._ask("step")
        self.losses.append(answer["loss"])
        return answer["seconds"]

    def finish(self) -> dict[str, Any]:
        """End the process and return what its loop has to say at the end (`serve`)."""
        answer = self._ask("finish")
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=60)
        self.kill()
        return answer

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How the process ended; None while it runs or stands still."""
        return self._process.poll()

    def kill(self) -> None:
        """End the process at once, if it has not ended, and let go of it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # a word that nobody is there to read
            self._process.stdin.close()
        self._process.stdout.close()

    def _ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerEnded(f"a worker ended: exit code {self._process.wait()}") from None
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                self._process.send_signal(signal.SIGSTOP)
                return json.loads(line.removeprefix(_ANSWER))
        raise WorkerEnded(f"a worker ended: exit code {self._process.wait()}")


def take_turns(
    workers: Mapping[str, Worker], rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Let workers do a step each, round after round; return the seconds of each worker's steps.

    Every second round goes backward, so that nobody always follows the same neighbour. The first
    `warm_up` steps of each worker, which compile and allocate, are not in the result. If one fails,
    none is left running.
    """
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    try:
        for worker in workers.values():
            while len(worker.losses) < warm_up:
                worker.step()
        for number in range(rounds):
            for name in workers if number % 2 == 0 else reversed(list(workers)):
                seconds[name].append(workers[name].step())
    except BaseException:
        for worker in workers.values():
            worker.kill()
        raise
    return seconds


def serve(
    step: Callable[[], float],
    *,
    describe: Callable[[], dict[str, Any]] = _peak_rss,
    settle: Callable[[], None] = lambda: None,
) -> None:
    """Be a worker: read words from stdin, answer in lines of JSON among whatever libraries print.

    Args:
        step: does a step and returns its loss.
        describe: what the loop says at the end; its peak memory, if nothing else.
        settle: waits for what a step may have left running on a device.
    """
    if sys.platform == "linux":  # a process that stands still would outlive a parent that is killed
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    for line in sys.stdin:
        if line.strip() == "finish":
            print(_ANSWER + json.dumps(describe()), flush=True)
            return
        settle()
        started = time.perf_counter()
        loss = step()
        settle()
        seconds = time.perf_counter() - started
        print(_ANSWER + json.dumps({"seconds": seconds, "loss": loss}), flush=True)
