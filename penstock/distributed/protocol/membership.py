"""Who belongs to a run: shards in their places, engines in the order they came, and their words.

It is plain state with questions about it; what follows from an answer is decided by the conductor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.distributed.protocol import message_validation
from penstock.distributed.protocol.holders import Holders
from penstock.distributed.protocol.membership_view import View
from penstock.distributed.protocol.messages import Message


@dataclass(frozen=True)
class Beat:
    """What a node said when it last said that it is there."""

    progress: int = 0
    is_busy: bool = False

    @classmethod
    def read(cls, message: Message) -> Beat:
        """Return what a `BEAT` says.

        **Raises:** `ProtocolError` if it makes no sense.
        """
        return cls(
            message_validation.integer(message, "progress", 0), message.body.get("busy") is True
        )


class Roster:
    """The nodes of a run by their numbers.

    Args:
        shards: the nodes of each, in the order of the shards.
        engines: how many are wanted; `wanted` may be set at any time.
        least: with fewer engines than this no step is made: they would not have the memory.
    """

    def __init__(self, shards: Sequence[Sequence[int]], engines: int, least: int) -> None:
        self.wanted = engines
        self.least = least
        self.holders = Holders(shards)
        self.now = 0.0
        self._ready: dict[int, None] = {}  # engines that may take part, in the order they came
        self._heard: dict[int, float] = {}
        self._beats: dict[int, Beat] = {}

    @property
    def wanted(self) -> int:
        """How many engines are to take part, from the next step on."""
        return self._wanted

    @wanted.setter
    def wanted(self, engines: int) -> None:
        if engines < 1:
            raise ValueError(f"{engines} engines are wanted; a run needs at least one")
        self._wanted = engines

    @property
    def engines(self) -> tuple[int, ...]:
        """The engines that may take part, spare ones too."""
        return tuple(self._ready)

    @property
    def here(self) -> tuple[int, ...]:
        """All nodes that may take part: those of shards, then engines."""
        return (*self.holders.nodes, *self._ready)

    def __contains__(self, node: int) -> bool:
        return node in self.here or node in self.holders.newcomers

    def view(self, micro_batches: int) -> View:
        """Return who would take part in a step of so many micro-batches."""
        return View(self.holders.shards, self.engines[: min(self.wanted, micro_batches)])

    def lacks(self, view: View) -> str | None:
        """Say what a step of a view would lack; None if it can be made."""
        if self.holders.lost:
            return f"{self.holders.lost} of {len(view.shards)} shards are lost"
        if len(view.engines) < self.least:
            return f"{len(view.engines)} engine(s) left, {self.least} needed"
        return None

    # Who comes and goes

    def join(self, engine: int) -> None:
        """Take an engine among those that may take part."""
        self._ready[engine] = None
        self._heard[engine] = self.now

    def seat(self, shard: int, node: int) -> None:
        """Give the place of a shard that was lost to a new node."""
        self.holders.add(shard, node)
        self._heard[node] = self.now

    def come(self, shard: int, node: int) -> None:
        """Take a newcomer that is to hold a shard beside others."""
        self.holders.newcomers[node] = shard
        self._heard[node] = self.now

    def lose(self, node: int) -> None:
        """Take note that a node is gone."""
        self._ready.pop(node, None)
        self.holders.remove(node)
        self._forget(node)

    def _forget(self, node: int) -> None:
        self._heard.pop(node, None)
        self._beats.pop(node, None)

    # What they say

    def hear(self, node: int, beat: Beat | None = None) -> None:
        """Take note that a node is there, and of what it says; others do not count."""
        if node in self:
            self._heard[node] = self.now
            if beat is not None:
                self._beats[node] = beat

    def silent(self, seconds: float) -> list[tuple[int, float]]:
        """Return who has been silent for longer than that, and for how long."""
        nodes = (*self.here, *self.holders.newcomers)
        found = [(node, self.now - self._heard.get(node, self.now)) for node in nodes]
        return [(node, silent) for node, silent in found if silent > seconds]

    def progress(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return how far each has got in this epoch, as it has last said."""
        return {node: self._beats.get(node, Beat()).progress for node in nodes}

    def busy(self, nodes: Iterable[int]) -> list[int]:
        """Return who of them said that it had something to do."""
        return [node for node in nodes if self._beats.get(node, Beat()).is_busy]

    # Time

    def pass_time(self, now: float, most: float) -> float:
        """Let it be so late; return the time in which nobody can have been heard.

        Of a pause longer than `most` the rest is one in which this process itself stood still: what
        others said meanwhile has yet to be read.
        """
        pause, self.now = now - self.now, now
        still = max(0.0, pause - most)
        if still:
            self._heard = {node: heard + still for node, heard in self._heard.items()}
        return still
