"""The assignment of replica slots to nodes, for shards in processes of their own.

A shard has one slot per replica. All nodes with a slot of a shard hold the same state. A node that
takes a slot while others hold the shard is a learner until it has received a copy. If all holders
of a shard are lost, only the slot that was lost last can be taken, because its stored state is the
newest. The number of a lost node is not used again: a replacement is another node.
"""

import threading
from collections.abc import Collection

from penstock.distributed.control_messages import ReplicaSlot


class ReplicaAssignment:
    """Written in the endpoint's thread; the trainer's thread waits for changes.

    Args:
        shards: the number of shards; all slots are vacant at first.
        replicas: the number of slots of each shard.
    """

    def __init__(self, shards: int, replicas: int = 1) -> None:
        self._vacant = {ReplicaSlot(s, r) for s in range(shards) for r in range(replicas)}
        self._holders: list[dict[int, ReplicaSlot]] = [{} for _ in range(shards)]
        self._learners: dict[int, ReplicaSlot] = {}
        # The slot that was lost last, of each shard without a holder.
        self._lost_last: dict[int, ReplicaSlot] = {}
        self._lost_holders: set[int] = set()  # nodes that held a shard and were lost
        self._changed = threading.Condition()
        self.was_complete = not shards  # whether all slots were filled at the same time
        self.retired = 0  # slots that stay vacant permanently

    @property
    def is_incomplete(self) -> bool:
        """Whether the run must wait for a node to take a slot."""
        return not self.was_complete or not all(self._holders)

    @property
    def learners(self) -> list[tuple[int, int]]:
        """Shard and node of each learner."""
        with self._changed:
            return [(slot.shard, node) for node, slot in self._learners.items()]

    def free(self, taken: Collection[ReplicaSlot | None]) -> list[ReplicaSlot]:
        """Return the vacant slots that no joining process has, the first slot of every shard first.

        Of a shard without a holder, only the slot that was lost last.
        """
        free = [p for p in self._vacant.difference(taken) if self._lost_last.get(p.shard, p) == p]
        return sorted(free, key=lambda slot: (slot.replica, slot.shard))

    def is_held(self, shard: int) -> bool:
        """Tell whether any node holds a shard."""
        return bool(self._holders[shard])

    def take(self, slot: ReplicaSlot, node: int) -> None:
        """Assign a slot to a node that has the state of the shard."""
        with self._changed:
            self._holders[slot.shard][node] = slot
            self._lost_last.pop(slot.shard, None)
            self._vacant.discard(slot)
            self.was_complete = self.was_complete or not self._vacant
            self._changed.notify_all()

    def add_learner(self, slot: ReplicaSlot, node: int) -> None:
        """Assign a slot to a learner."""
        with self._changed:
            self._learners[node] = slot
            self._vacant.discard(slot)

    def promote(self, node: int) -> None:
        """Make a learner that has received its copy a holder of the shard."""
        self.take(self._learners.pop(node), node)

    def lose(self, node: int) -> bool:
        """Make the slot of a node vacant; return whether it is: a retired slot is not."""
        with self._changed:
            slot = self._learners.pop(node, None)
            for shard, holders in enumerate(self._holders):
                if node in holders:
                    slot = holders.pop(node)
                    self._lost_holders.add(node)
                    if not holders:
                        self._lost_last[shard] = slot
            if slot is not None:
                self._vacant.add(slot)
        return slot is not None

    def retire(self, node: int) -> None:
        """Retire the slot of a learner permanently."""
        with self._changed:
            if self._learners.pop(node, None) is not None:
                self.retired += 1

    def is_replaced(self, node: int) -> bool:
        """Tell whether a node held a shard and was lost, so that another node takes its slot."""
        with self._changed:
            return node in self._lost_holders

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
        """Wait at most so many seconds until all slots are taken; return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: self.was_complete, seconds)

    def wait_for_holder(self, shard: int, seconds: float) -> None:
        """Wait at most so many seconds until a node holds a shard."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._holders[shard]), seconds)
