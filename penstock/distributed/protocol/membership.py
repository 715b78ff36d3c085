"""The nodes of a run: the replicas of every shard, engines and relays in the order they joined, but
for rotations of the engines (`rotate_engines`).

This module is plain state with queries; the coordinator decides what to do. All replicas of a shard
hold the same bits, because all of them do the same work. A new node waits as a learner until it has
received a copy of the shard.
"""

import itertools
from collections.abc import Sequence

from penstock.distributed.protocol.membership_view import MembershipView
from penstock.errors import numbered


class Membership:
    """The nodes of a run by their numbers.

    Args:
        shards: the replicas of each shard, in shard order.
        engines: how many engines are wanted; `wanted` may be set at any time.
        least: the number of engines whose memory suffices; with fewer engines no step is made.
        relays: how many relays are wanted; `wanted_relays` may be set at any time. A step is made
            with the relays that there are, and without relays if there are none.
    """

    def __init__(
        self, shards: Sequence[Sequence[int]], engines: int, least: int, relays: int = 0
    ) -> None:
        self.wanted, self.wanted_relays = engines, relays
        self.least = least
        self.holders = ReplicaSets(shards)
        self._ready: dict[int, None] = {}  # engines that may take part, in order
        self._relays: dict[int, None] = {}  # that may take part, in the order they joined

    @property
    def wanted(self) -> int:
        """How many engines are to take part, from the next step on."""
        return self._wanted

    @wanted.setter
    def wanted(self, engines: int) -> None:
        if engines < 1:
            raise ValueError(f"expected at least 1 engine, got {engines}")
        self._wanted = engines

    @property
    def engines(self) -> tuple[int, ...]:
        """The engines that may take part, including spare engines."""
        return tuple(self._ready)

    @property
    def relays(self) -> tuple[int, ...]:
        """The relays that may take part."""
        return tuple(self._relays)

    @property
    def participants(self) -> tuple[int, ...]:
        """All nodes that may take part: replicas, then engines, then relays."""
        return (*self.holders.nodes, *self._ready, *self._relays)

    @property
    def all(self) -> tuple[int, ...]:
        """All nodes: replicas, engines, relays, and learners."""
        return (*self.participants, *self.holders.learners)

    def __contains__(self, node: int) -> bool:
        return node in self.participants or node in self.holders.learners

    def view(self, micro_batches: int) -> MembershipView:
        """Return the nodes that would take part in a step of so many micro-batches."""
        engines = self.engines[: min(self.wanted, micro_batches)]
        return MembershipView(self.holders.shards, engines, self.relays[: self.wanted_relays])

    def lacks(self, view: MembershipView) -> str | None:
        """Return what is missing for a step of a view; None if the step can be made."""
        if self.holders.lost:
            return f"{self.holders.lost} of {len(view.shards)} shards are lost"
        if len(view.engines) < self.least:
            return f"{numbered(len(view.engines), 'engine')} left, {self.least} needed"
        return None

    # Changes

    def join(self, engine: int) -> None:
        """Add an engine."""
        self._ready[engine] = None

    def rotate_engines(self) -> None:
        """Move the first engine behind the others, spare engines included: every engine then has
        other neighbors."""
        self._ready = dict.fromkeys((*self.engines[1:], *self.engines[:1]))

    def join_relay(self, relay: int) -> None:
        """Add a relay."""
        self._relays[relay] = None

    def assign_shard(self, shard: int, node: int) -> None:
        """Assign a lost shard to a new node."""
        self.holders.add(shard, node)

    def add_learner(self, shard: int, node: int) -> None:
        """Add a learner of a shard."""
        self.holders.learners[node] = shard

    def lose(self, node: int) -> None:
        """Remove a node."""
        self._ready.pop(node, None)
        self._relays.pop(node, None)
        self.holders.remove(node)


class ReplicaSets:
    """The replicas of every shard, the streaming replica first.

    Args:
        shards: the initial replicas of each shard, in shard order.
    """

    def __init__(self, shards: Sequence[Sequence[int]]) -> None:
        self._shards = [list(nodes) for nodes in shards]
        self.learners: dict[int, int] = {}  # the shard that each learner is to hold

    @property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """The replicas of each shard."""
        return tuple(map(tuple, self._shards))

    @property
    def nodes(self) -> tuple[int, ...]:
        """The replicas of all shards."""
        return tuple(itertools.chain.from_iterable(self._shards))

    @property
    def lost(self) -> int:
        """How many shards have no replica."""
        return sum(not nodes for nodes in self._shards)

    def shard_of(self, node: int) -> int:
        """Return the shard of a replica."""
        return next(shard for shard, nodes in enumerate(self._shards) if node in nodes)

    def is_last_replica(self, node: int) -> bool:
        """Tell whether a node is the only replica of its shard."""
        return [node] in self._shards

    def add(self, shard: int, node: int) -> None:
        """Add a replica to a shard; it may have been a learner."""
        self.learners.pop(node, None)
        self._shards[shard].append(node)

    def remove(self, node: int) -> None:
        """Remove a replica or a learner."""
        self.learners.pop(node, None)
        for nodes in self._shards:
            if node in nodes:
                nodes.remove(node)

    def rotate_primary(self) -> None:
        """Make the next replica of every shard the streaming replica; a single replica stays."""
        self._shards = [[*nodes[1:], *nodes[:1]] for nodes in self._shards]
