"""What a node may ask of whatever runs it: a network of processes, or a simulation of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.distributed.protocol.messages import Message


class NodeContext(Protocol):
    """Carries a node's messages and does its work. A node is only ever called from one thread."""

    def send(self, to: int, message: Message) -> None:
        """Send to a node by its number; a node that is gone is no error."""
        ...

    def work(
        self,
        job: Callable[[], Any],
        then: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Do a job away from the node's thread, behind those before it; then tell the node."""
        ...


class NodeHost(Protocol):
    """What carries the messages and does the work of several nodes."""

    def send(self, sender: int, to: int, message: Message) -> None:
        """Send from one node to another, each by its number."""
        ...

    def work(
        self,
        number: int,
        job: Callable[[], Any],
        then: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Do a job of a node, behind those before it; then tell the node."""
        ...


@dataclass(frozen=True)
class BoundContext:
    """A carrier as one of its nodes sees it."""

    carrier: NodeHost
    number: int

    def send(self, to: int, message: Message) -> None:
        """Send to a node by its number."""
        self.carrier.send(self.number, to, message)

    def work(
        self,
        job: Callable[[], Any],
        then: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Do a job, then tell the node."""
        self.carrier.work(self.number, job, then, failed)
