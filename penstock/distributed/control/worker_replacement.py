"""Starts a worker in the place of each that was lost or hangs, until too many in a row have failed.

A standby engine that is ready takes over before that (`membership.py`).

Workers are counted by the role for which they were started. A worker that ended before it became an
engine or a shard has failed. After several failures in a row, more workers would fail in the same
way.
"""

import time
from collections.abc import Callable, Mapping

from penstock.distributed.control_messages import Role
from penstock.distributed.launchers import Launcher, WorkerExit

_MOST_FAILURES = 3
_RETRY_SECONDS = 5.0  # seconds after a failed start: memory may be short for a moment


class WorkerSupervisor:
    """Keeps the wanted number of workers running.

    Args:
        launcher: starts and ends workers.
        on_event: called with the kind and the text of an event.
        join_seconds: the seconds from the start of a worker until it must have joined; infinite if
            users start the workers.
    """

    def __init__(
        self, launcher: Launcher, on_event: Callable[[str, str], None], join_seconds: float
    ) -> None:
        self._launcher, self._on_event = launcher, on_event
        self._join_seconds = join_seconds
        self._running: dict[str, Role] = {}
        self._started_at: dict[str, float] = {}  # of the workers that have not joined
        self._late: set[str] = set()  # that were ended because they had not joined
        self._ready: set[str] = set()
        self._failures = 0  # workers in a row that ended before they were ready
        self._last_failure = ""
        self._retry_at = 0.0
        self._reported_wait: str | None = None
        self._has_reported = False

    def fill(self, wanted: Mapping[Role, int]) -> None:
        """Start the missing workers of each role, in the order of the mapping."""
        for role, number in wanted.items():
            for _ in range(number - list(self._running.values()).count(role)):
                if self.given_up is None:
                    self._start(role)

    def replace(self, wanted: Mapping[Role, int]) -> None:
        """Start a replacement for each missing worker, unless too many in a row have failed."""
        for ended in self._launcher.poll():
            self._record_exit(ended)
        waits_for = self._launcher.waits_for()
        if waits_for is not None and waits_for != self._reported_wait:
            self._on_event("waiting", waits_for)
        self._reported_wait = waits_for
        self._end_late(is_waiting=waits_for is not None)
        if self.given_up is None:
            if time.monotonic() >= self._retry_at:
                self.fill(wanted)
        elif not self._has_reported:
            self._has_reported = True
            self._on_event("not replaced", self.given_up)

    def _end_late(self, *, is_waiting: bool) -> None:
        """End the workers that have not joined in time, unless workers wait for resources."""
        now = time.monotonic()
        if is_waiting:
            self._started_at = dict.fromkeys(self._started_at, now)
        for worker, started_at in list(self._started_at.items()):
            if now - started_at > self._join_seconds:
                how = f"{worker} has not joined within {now - started_at:.0f} s of its start"
                self._on_event("worker hangs", f"{how}, longer than cluster.longest_job")
                self._launcher.end(worker)
                self._late.add(worker)
                self._record_failure(worker, how)  # a hung launcher may report no exit

    def mark_joined(self, worker: str) -> None:
        """Record that a worker has joined."""
        self._started_at.pop(worker, None)

    def mark_ready(self, worker: str) -> None:
        """Record that a worker has become an engine or a shard."""
        self._ready.add(worker)
        self._failures, self._has_reported = 0, False

    @property
    def given_up(self) -> str | None:
        """Why no more workers are started; None while workers are started."""
        if self._failures < _MOST_FAILURES:
            return None
        text = "workers in a row ended before they could compute, or could not be started"
        return f"{self._failures} {text}; {self._last_failure}"

    def _record_exit(self, ended: WorkerExit) -> None:
        self._on_event("worker ended", ended.how)
        if ended.worker in self._ready:
            self._running.pop(ended.worker, None)
            self._ready.discard(ended.worker)
        elif ended.worker in self._late:  # its failure is recorded already
            self._late.discard(ended.worker)
        else:
            self._record_failure(ended.worker, ended.how)

    def _record_failure(self, worker: str, how: str) -> None:
        """Record that a worker has ended, or hangs, before it was ready."""
        self._running.pop(worker, None)
        self._started_at.pop(worker, None)
        self._failures += 1
        self._last_failure = how

    def _start(self, role: Role) -> None:
        try:
            worker = self._launcher.start(role)
        except OSError as error:
            self._failures += 1
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            self._last_failure = f"a worker could not be started: {error}"
            self._on_event("not started", self._last_failure)
            return
        self._running[worker] = role
        self._started_at[worker] = time.monotonic()
