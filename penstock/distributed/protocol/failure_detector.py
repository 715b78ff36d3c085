"""Detects silent nodes by their heartbeats, and stalled steps by the lack of change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.messages import Message

# The least rate, over all processes of a run, at which received bytes are progress: 64 kbit/s, a
# thirtieth of the slowest link that is tested. A step of GPT-2 (124 M parameters, 12 bytes each in
# fp32) would take two days at this rate, so a slower transfer is a defect.
LEAST_BYTES_PER_SECOND = 8_000


@dataclass(frozen=True)
class Heartbeat:
    """The content of a node's heartbeat.

    It has the node's progress in the epoch, whether the node has work, and the bytes of payloads
    that its process has received, those of messages in progress included.
    """

    progress: int = 0
    is_busy: bool = False
    received_bytes: int = 0

    @classmethod
    def read(cls, message: Message) -> Heartbeat:
        """Return the content of a `HEARTBEAT` message.

        **Raises:** `ProtocolError` if the message is invalid.
        """
        return cls(
            message_validation.integer(message, "progress", 0),
            message.body.get("busy") is True,
            message_validation.integer(message, "received", 0),
        )


class FailureDetector:
    """The time of each node's last message, and its last heartbeat."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heard_at: dict[int, float] = {}
        self._heartbeats: dict[int, Heartbeat] = {}

    def watch(self, node: int) -> None:
        """Start the timeout of a node; before that its silence does not count."""
        self._heard_at[node] = self.now

    def forget(self, node: int) -> None:
        """Remove the state of a lost node."""
        self._heard_at.pop(node, None)
        self._heartbeats.pop(node, None)

    def hear(self, node: int, heartbeat: Heartbeat | None = None) -> None:
        """Record that a message of a node has arrived, and the heartbeat if it was one."""
        self._heard_at[node] = self.now
        if heartbeat is not None:
            self._heartbeats[node] = heartbeat

    def silent(self, nodes: Iterable[int], seconds: float) -> list[tuple[int, float]]:
        """Return the nodes that have been silent for more than `seconds`, and for how long."""
        found = [(node, self.now - self._heard_at.get(node, self.now)) for node in nodes]
        return [(node, silent) for node, silent in found if silent > seconds]

    def progress(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return each node's progress in this epoch, from its last heartbeat."""
        return {node: self._heartbeats.get(node, Heartbeat()).progress for node in nodes}

    def received_bytes(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return the bytes that each node's process had received at its last heartbeat."""
        return {node: self._heartbeats.get(node, Heartbeat()).received_bytes for node in nodes}

    def busy(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes that had work at their last heartbeat."""
        return [node for node in nodes if self._heartbeats.get(node, Heartbeat()).is_busy]

    def may_work(self, nodes: Iterable[int], stall: float) -> bool:
        """Tell whether a node may have begun to work after its last heartbeat.

        Such work may hold up the heartbeats, as may other processes of its host. But a node that
        is silent for twice the stall, and yet not lost, is waiting for its connection.
        """
        return any(silent <= 2 * stall for _, silent in self.silent(nodes, stall / 2))

    def pass_time(self, now: float, most: float) -> float:
        """Advance the clock; return the seconds in which this process could not receive messages.

        If more than `most` seconds have passed since the last call, this process was not scheduled
        for the rest of them. Messages that arrived in that time are still unread.
        """
        pause, self.now = now - self.now, now
        paused = max(0.0, pause - most)
        if paused:
            self._heard_at = {node: heard_at + paused for node, heard_at in self._heard_at.items()}
        return paused


class StallTimer:
    """Measures for how long there has been no progress.

    Progress is a change of the observed state, or an amount that grows fast enough.

    Args:
        least_rate: the least growth per second that is progress, summed over all nodes.
    """

    def __init__(self, least_rate: float) -> None:
        self._least_rate, self._since = least_rate, 0.0
        self._seen: Any = None
        self._amounts: Mapping[int, float] = {}  # at `_since`

    def begin(self, now: float) -> None:
        """Restart the timer."""
        self._since, self._seen = now, None

    def pause(self, seconds: float) -> None:
        """Exclude seconds in which nothing could be observed."""
        self._since += seconds

    def stalled_seconds(self, now: float, seen: Any, amounts: Mapping[int, float]) -> float:
        """Return for how many seconds there has been no progress.

        Args:
            seen: the observed state; not None.
            amounts: the amount of each node.
        """
        grown = sum(max(0, n - self._amounts.get(node, n)) for node, n in amounts.items())
        if seen != self._seen or grown >= self._least_rate * (now - self._since):
            self._since, self._seen, self._amounts = now, seen, amounts
        return now - self._since
