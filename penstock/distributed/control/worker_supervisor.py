"""Keeps the wanted number of workers running, and stops starting them after repeated failures.

Workers are counted by the role for which they were started. A worker that ended before it became an
engine or a shard has failed. After several failures in a row, more workers would fail in the same
way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from penstock.distributed.control_messages import Role
from penstock.distributed.launchers import Launcher, WorkerExit

_MOST_IN_VAIN = 3
_NEXT_TRY = 5.0  # seconds after a failed start: memory may be short for a moment


class WorkerSupervisor:
    """Keeps the wanted number of workers running.

    Args:
        launcher: starts and ends workers.
        say: called with the kind and the text of an event.
    """

    def __init__(self, launcher: Launcher, say: Callable[[str, str], None]) -> None:
        self._launcher, self._say = launcher, say
        self._running: dict[str, Role] = {}
        self._useful: set[str] = set()
        self._in_vain = 0  # workers in a row that ended before they were ready
        self._last_words = ""
        self._next_try = 0.0
        self._waited_for: str | None = None
        self._has_said_so = False

    def fill(self, wanted: Mapping[Role, int]) -> None:
        """Start the missing workers of each role, in the order of the mapping."""
        for role, number in wanted.items():
            for _ in range(number - list(self._running.values()).count(role)):
                if self.given_up is None:
                    self._start(role)

    def replace(self, wanted: Mapping[Role, int]) -> None:
        """Start a replacement for each missing worker, unless too many in a row have failed."""
        for ended in self._launcher.poll():
            self._take_leave(ended)
        waits_for = self._launcher.waits_for()
        if waits_for is not None and waits_for != self._waited_for:
            self._say("waiting", waits_for)
        self._waited_for = waits_for
        if self.given_up is None:
            if time.monotonic() >= self._next_try:
                self.fill(wanted)
        elif not self._has_said_so:
            self._has_said_so = True
            self._say("not replaced", self.given_up)

    def is_of_use(self, worker: str) -> None:
        """Record that a worker has become an engine or a shard."""
        self._useful.add(worker)
        self._in_vain, self._has_said_so = 0, False

    @property
    def given_up(self) -> str | None:
        """Why no more workers are started; None while workers are started."""
        if self._in_vain < _MOST_IN_VAIN:
            return None
        text = "workers in a row ended before they could compute, or could not be started"
        return f"{self._in_vain} {text}; {self._last_words}"

    def _take_leave(self, ended: WorkerExit) -> None:
        self._say("worker ended", ended.how)
        self._running.pop(ended.worker, None)
        if ended.worker in self._useful:
            self._useful.discard(ended.worker)
        else:
            self._in_vain += 1
            self._last_words = ended.how

    def _start(self, role: Role) -> None:
        try:
            worker = self._launcher.start(role)
        except OSError as error:
            self._in_vain += 1
            self._next_try = time.monotonic() + _NEXT_TRY
            self._last_words = f"a worker could not be started: {error}"
            self._say("not started", self._last_words)
            return
        self._running[worker] = role
