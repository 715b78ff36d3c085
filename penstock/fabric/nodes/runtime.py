"""What a node may ask of whatever runs it: a network of processes, or a simulation of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from penstock.fabric.messages import Message


class Runtime(Protocol):
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
