"""Which nodes are silent or make no progress, from their heartbeats and from what has changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.messages import Message


@dataclass(frozen=True)
class Heartbeat:
    """What a node said when it last said that it is there."""

    progress: int = 0
    is_busy: bool = False

    @classmethod
    def read(cls, message: Message) -> Heartbeat:
        """Return what a `HEARTBEAT` says.

        **Raises:** `ProtocolError` if it makes no sense.
        """
        return cls(
            message_validation.integer(message, "progress", 0), message.body.get("busy") is True
        )


class FailureDetector:
    """The time at which each node was last heard, and its last heartbeat."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heard: dict[int, float] = {}
        self._beats: dict[int, Heartbeat] = {}

    def watch(self, node: int) -> None:
        """Begin to count the silence of a node that has joined."""
        self._heard[node] = self.now

    def forget(self, node: int) -> None:
        """Keep nothing of a node that is lost."""
        self._heard.pop(node, None)
        self._beats.pop(node, None)

    def hear(self, node: int, beat: Heartbeat | None = None) -> None:
        """Record that a node has sent something, and its heartbeat if it was one."""
        self._heard[node] = self.now
        if beat is not None:
            self._beats[node] = beat

    def silent(self, nodes: Iterable[int], seconds: float) -> list[tuple[int, float]]:
        """Return the nodes that have been silent for longer than that, and for how long."""
        found = [(node, self.now - self._heard.get(node, self.now)) for node in nodes]
        return [(node, silent) for node, silent in found if silent > seconds]

    def progress(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return each node's progress in this epoch, as its last heartbeat says."""
        return {node: self._beats.get(node, Heartbeat()).progress for node in nodes}

    def busy(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes whose last heartbeat says that they have work."""
        return [node for node in nodes if self._beats.get(node, Heartbeat()).is_busy]

    def pass_time(self, now: float, most: float) -> float:
        """Advance the clock; return the time in which this process cannot have heard anybody.

        Of a pause longer than `most`, the rest counts as time in which this process was not
        scheduled: what others sent meanwhile has yet to be read.
        """
        pause, self.now = now - self.now, now
        unheard = max(0.0, pause - most)
        if unheard:
            self._heard = {node: heard + unheard for node, heard in self._heard.items()}
        return unheard


class StallTimer:
    """Compares what is seen of a step at one time and the next."""

    def __init__(self) -> None:
        self._since = 0.0
        self._seen: Any = None

    def begin(self, now: float) -> None:
        """Count from now on."""
        self._since = now

    def pause(self, seconds: float) -> None:
        """Leave out a time in which nothing could be seen."""
        self._since += seconds

    def stalled_seconds(self, now: float, seen: Any) -> float:
        """Return for how many seconds all that is seen has been as it is."""
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since
