"""What starts the worker processes of a run, as the rest of a run sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.distributed.control_messages import Role


@dataclass(frozen=True)
class WorkerExit:
    """A worker that has ended: which it was, and how."""

    worker: str
    how: str


class Launcher(Protocol):
    """Starts workers, somewhere; called by one thread at a time, which it never makes wait."""

    def start(self, role: Role) -> str:
        """Start one more worker, which joins by itself when it can; return its name, at once.

        Where a worker may be either, `role` need not bind it.
        """
        ...

    def poll(self) -> list[WorkerExit]:
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


class ExternalLauncher:
    """Starts nobody: workers are started by others, and join when they can."""

    def __init__(self) -> None:
        self._asked = 0

    def start(self, role: Role) -> str:
        """Leave it to others to start one more."""
        self._asked += 1
        return f"of others-{self._asked}"

    def poll(self) -> list[WorkerExit]:
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
