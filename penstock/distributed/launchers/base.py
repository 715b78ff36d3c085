"""The interface of launchers, which start the worker processes of a run."""

from dataclasses import dataclass
from typing import Protocol

from penstock.distributed.control_messages import Role


@dataclass(frozen=True)
class WorkerExit:
    """The exit of a worker: its name and the reason."""

    worker: str
    how: str


class Launcher(Protocol):
    """Starts workers. One thread at a time calls a launcher; only `close` may block."""

    def start(self, role: Role) -> str:
        """Start one more worker and return its name at once; the worker joins asynchronously.

        A launcher whose workers can take either role may ignore `role`.
        """
        ...

    def poll(self) -> list[WorkerExit]:
        """Return the workers that have ended since the last call."""
        ...

    def waits_for(self) -> str | None:
        """Return the reason why started workers are not running yet; None if there is none."""
        ...

    @property
    def hosts(self) -> int | None:
        """The number of hosts that had room for workers when the run started; None: unknown."""
        ...

    def starves(self, worker: str) -> bool:
        """Tell whether a worker is runnable but waits for a processor; False if this is unknown."""
        ...

    def end(self, worker: str) -> None:
        """Kill a worker that is not needed any more; ignore a worker of another launcher."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...


class ExternalLauncher:
    """Starts no process: users start the workers, which join when they can."""

    def __init__(self) -> None:
        self._started = 0

    def start(self, role: Role) -> str:
        """Return a name; the user starts the worker."""
        self._started += 1
        return f"external-{self._started}"

    def poll(self) -> list[WorkerExit]:
        """Return nothing: the end of a worker is detected by its connection."""
        return []

    def waits_for(self) -> str | None:
        """Return None: the run reports the address on which it listens."""
        return None

    @property
    def hosts(self) -> int | None:
        """None: users choose the hosts."""
        return None

    def starves(self, worker: str) -> bool:
        """Return False: the worker is on another host."""
        return False

    def end(self, worker: str) -> None:
        """Do nothing: the worker has no connection any more, and may join again as a new engine."""

    def close(self) -> None:
        """Do nothing: the workers end with the run."""
