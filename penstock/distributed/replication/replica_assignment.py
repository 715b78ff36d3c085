"""The places of a run's shards that are processes of their own: who has each, and who comes next.

A shard has as many places as there are to be replicas of it. All who have one hold the same. Who
comes while others hold the shard is a learner until it has been given a copy; who comes when all
are lost takes the place of the one that was lost last, since what that had stored is the newest. A
node that was lost is not a node again: whoever takes its place is another one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from penstock.distributed.control_messages import ReplicaSlot


class ReplicaAssignment:
    """Written in the endpoint's thread, waited for in the trainer's.

    Args:
        shards: how many there are; all places are vacant at first.
        replicas: how many places each has.
    """

    def __init__(self, shards: int, replicas: int = 1) -> None:
        self._vacant = {ReplicaSlot(s, r) for s in range(shards) for r in range(replicas)}
        self._holders: list[dict[int, ReplicaSlot]] = [{} for _ in range(shards)]
        self._learners: dict[int, ReplicaSlot] = {}
        self._newest: dict[
            int, ReplicaSlot
        ] = {}  # of shards that nobody holds, the place lost last
        self._left: set[int] = set()  # the nodes that have held a shard, and were lost
        self._changed = threading.Condition()
        self.have_come = not shards  # whether all were there at once
        self.given_up = 0  # places that are not to be taken again

    @property
    def are_missing(self) -> bool:
        """Whether the run cannot go on before somebody takes a place."""
        return not self.have_come or not all(self._holders)

    @property
    def learners(self) -> list[tuple[int, int]]:
        """Shard and node of those who wait for a copy."""
        with self._changed:
            return [(place.shard, node) for node, place in self._learners.items()]

    def free(self, taken: Collection[ReplicaSlot | None]) -> list[ReplicaSlot]:
        """Return the vacant places that nobody is about to take, every shard's first place first.

        Of a shard that is lost only the place of the node that was lost last.
        """
        free = [p for p in self._vacant.difference(taken) if self._newest.get(p.shard, p) == p]
        return sorted(free, key=lambda place: (place.replica, place.shard))

    def is_held(self, shard: int) -> bool:
        """Tell whether any node holds a shard."""
        return bool(self._holders[shard])

    def take(self, place: ReplicaSlot, node: int) -> None:
        """Give a place to a node that holds what is to be held there."""
        with self._changed:
            self._holders[place.shard][node] = place
            self._newest.pop(place.shard, None)
            self._vacant.discard(place)
            self.have_come = self.have_come or not self._vacant
            self._changed.notify_all()

    def wait_for_copy(self, place: ReplicaSlot, node: int) -> None:
        """Give a place to a learner."""
        with self._changed:
            self._learners[node] = place
            self._vacant.discard(place)

    def promote(self, node: int) -> None:
        """Let a learner that has its copy be one of those who hold the shard."""
        self.take(self._learners.pop(node), node)

    def lose(self, node: int) -> None:
        """Make the place of a node vacant."""
        with self._changed:
            place = self._learners.pop(node, None)
            for shard, holders in enumerate(self._holders):
                if node in holders:
                    place = holders.pop(node)
                    self._left.add(node)
                    if not holders:
                        self._newest[shard] = place
            if place is not None:
                self._vacant.add(place)

    def give_up(self, node: int) -> None:
        """Let nobody take a learner's place again."""
        with self._changed:
            if self._learners.pop(node, None) is not None:
                self.given_up += 1

    def is_replaced(self, node: int) -> bool:
        """Tell whether the shard that a node held, and was the last to hold, is held again."""
        with self._changed:
            return node in self._left

    def nodes(self, shard: int) -> tuple[int, ...]:
        """Return the nodes that hold a shard."""
        with self._changed:
            return tuple(self._holders[shard])

    @property
    def all_nodes(self) -> tuple[int, ...]:
        """The nodes that hold any shard."""
        with self._changed:
            return tuple(node for holders in self._holders for node in holders)

    def wait(self, seconds: float) -> bool:
        """Wait until all have come, for so long at most; return whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self.have_come, seconds)

    def wait_for_holder(self, shard: int, seconds: float) -> None:
        """Wait until somebody holds a shard, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._holders[shard]), seconds)
