"""What the processes of a run say of themselves with every beat, and what is known from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.distributed.control_messages import Figures
from penstock.distributed.protocol.messages import Message


class Vitals:
    """The last words of every node."""

    def __init__(self) -> None:
        self.peak_bytes = 0  # the most that any engine has said to have held
        self._figures: dict[int, Figures] = {}
        self._rested: dict[int, int] = {}  # the epoch in which a node was last without work

    def take(self, message: Message) -> None:
        """Take a beat.

        **Raises:** `ProtocolError` if it makes no sense.
        """
        figures = Figures.read(message)
        if not message.body.get("busy"):
            self._rested[message.sender] = message.epoch
        if figures is not None:
            self._figures[message.sender] = figures
            self.peak_bytes = max(self.peak_bytes, figures.peak_bytes)

    def forget(self, node: int) -> None:
        """Keep nothing of a node that is gone."""
        self._figures.pop(node, None)
        self._rested.pop(node, None)

    def figures(self, engines: Iterable[int]) -> dict[int, Figures]:
        """Return what engines have last said of themselves."""
        return {engine: self._figures.get(engine, Figures()) for engine in engines}

    def have_rested(self, nodes: Collection[int], epoch: int) -> bool:
        """Tell whether all of them have been without work in this epoch, or a later one."""
        return all(self._rested.get(node, -1) >= epoch for node in nodes)
