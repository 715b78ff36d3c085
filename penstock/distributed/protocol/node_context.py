"""The services of a node's host, which is a network of processes or a simulation."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.distributed.protocol.messages import Message
from penstock.spans import Clock


@dataclass(frozen=True)
class Job:
    """Work of a node in another thread.

    After `run`, the node's own thread calls `then` with the result, or `failed` with the error.
    `span` measures `run`.
    """

    run: Callable[[], Any]
    then: Callable[[Any], None]
    failed: Callable[[Exception], None]
    span: AbstractContextManager[None] = field(default_factory=nullcontext)


class NodeContext(Protocol):
    """Carries a node's messages and runs its jobs. A node is only ever called from one thread.

    `clock` is the host's clock, which is simulated in a simulation.
    """

    @property
    def clock(self) -> Clock: ...

    def send(self, to: int, message: Message) -> None:
        """Send to a node by its number; a lost node is no error."""
        ...

    def work(self, job: Job) -> None:
        """Run a job after all earlier jobs."""
        ...


class NodeHost(Protocol):
    """Carries the messages and runs the jobs of several nodes."""

    @property
    def clock(self) -> Clock: ...

    def send(self, sender: int, to: int, message: Message) -> None:
        """Send from one node to another, each by its number."""
        ...

    def work(self, number: int, job: Job) -> None:
        """Run a job of a node after its earlier jobs."""
        ...


@dataclass(frozen=True)
class BoundContext:
    """The context of one node of a host."""

    host: NodeHost
    number: int

    @property
    def clock(self) -> Clock:
        """The clock of the host."""
        return self.host.clock

    def send(self, to: int, message: Message) -> None:
        """Send to a node by its number."""
        self.host.send(self.number, to, message)

    def work(self, job: Job) -> None:
        """Run a job."""
        self.host.work(self.number, job)
