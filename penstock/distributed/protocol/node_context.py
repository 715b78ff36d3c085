"""The services of a node's host, which is a network of processes or a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.distributed.protocol.messages import Message
from penstock.spans import Clock, RunningSpan


class NodeContext(Protocol):
    """Carries a node's messages and runs its jobs. A node is only ever called from one thread.

    `clock` is the host's clock, which is simulated in a simulation.
    """

    @property
    def clock(self) -> Clock: ...

    def send(self, to: int, message: Message) -> None:
        """Send to a node by its number; a lost node is no error."""
        ...

    def work(
        self,
        job: Callable[[], Any],
        then: Callable[[Any], None],
        failed: Callable[[Exception], None],
        span: RunningSpan | None = None,
    ) -> None:
        """Run a job in another thread, after all earlier jobs; then call `then` or `failed`.

        **Arguments:** `span` measures the job.
        """
        ...


class NodeHost(Protocol):
    """Carries the messages and runs the jobs of several nodes."""

    @property
    def clock(self) -> Clock: ...

    def send(self, sender: int, to: int, message: Message) -> None:
        """Send from one node to another, each by its number."""
        ...

    def work(
        self,
        number: int,
        job: Callable[[], Any],
        then: Callable[[Any], None],
        failed: Callable[[Exception], None],
        span: RunningSpan | None = None,
    ) -> None:
        """Run a job of a node after its earlier jobs; then call `then` or `failed`."""
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

    def work(
        self,
        job: Callable[[], Any],
        then: Callable[[Any], None],
        failed: Callable[[Exception], None],
        span: RunningSpan | None = None,
    ) -> None:
        """Run a job, then call `then` or `failed`."""
        self.host.work(self.number, job, then, failed, span)
