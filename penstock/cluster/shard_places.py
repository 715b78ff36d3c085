"""The places of a run's shards that are processes of their own: who has each, and who comes next.

A node that was lost is not a node again: whoever takes its place is another one, its successor.
"""

from __future__ import annotations

import threading
from collections.abc import Collection


class ShardPlaces:
    """Written in the endpoint's thread, waited for in the trainer's.

    Args:
        count: how many there are; all are vacant at first.
    """

    def __init__(self, count: int) -> None:
        self._vacant = set(range(count))
        self._lost: dict[int, int] = {}  # the last nodes of shards whose places are vacant
        self._successors: dict[int, int] = {}  # of nodes that were lost
        self._changed = threading.Condition()
        self.have_come = not count  # whether all were there at once

    @property
    def are_vacant(self) -> bool:
        """Whether any place is."""
        return bool(self._vacant)

    def free(self, taken: Collection[int | None]) -> list[int]:
        """Return the vacant places that nobody is about to take, in order."""
        return sorted(self._vacant.difference(taken))

    def take(self, shard: int, node: int) -> None:
        """Give a place to a node."""
        with self._changed:
            if shard in self._lost:
                self._successors[self._lost.pop(shard)] = node
            self._vacant.discard(shard)
            self.have_come = self.have_come or not self._vacant
            self._changed.notify_all()

    def lose(self, shard: int, node: int) -> None:
        """Make a place vacant whose node is lost."""
        with self._changed:
            self._lost[shard] = node
            self._vacant.add(shard)

    def comes_back(self, node: int) -> bool:
        """Tell whether another takes a lost node's place, or has taken it."""
        with self._changed:
            return node in self._successors or node in self._lost.values()

    def wait(self, seconds: float) -> bool:
        """Wait until no place is vacant, for so long at most; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._vacant, seconds)

    def wait_for_successor(self, node: int, seconds: float) -> int | None:
        """Wait for whoever takes a lost node's place, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: node in self._successors, seconds)
            return self._successors.get(node)
