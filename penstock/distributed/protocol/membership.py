"""Which nodes belong to a run: the replicas of every shard, and engines in the order they joined.

This is plain state with queries; the coordinator decides what follows from an answer. All nodes of
a shard hold the same bits, because all of them do the same work. A node that joins beside them
waits until it has been given a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from penstock.distributed.protocol.membership_view import MembershipView


class Membership:
    """The nodes of a run by their numbers.

    Args:
        shards: the nodes of each, in the order of the shards.
        engines: how many are wanted; `wanted` may be set at any time.
        least: with fewer engines than this no step is made: they would not have the memory.
    """

    def __init__(self, shards: Sequence[Sequence[int]], engines: int, least: int) -> None:
        self.wanted = engines
        self.least = least
        self.holders = ReplicaSets(shards)
        self._ready: dict[int, None] = {}  # engines that may take part, in the order they came

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

    @property
    def all(self) -> tuple[int, ...]:
        """Those that may take part, and those that wait for a copy of a shard."""
        return (*self.here, *self.holders.learners)

    def __contains__(self, node: int) -> bool:
        return node in self.here or node in self.holders.learners

    def view(self, micro_batches: int) -> MembershipView:
        """Return who would take part in a step of so many micro-batches."""
        return MembershipView(self.holders.shards, self.engines[: min(self.wanted, micro_batches)])

    def lacks(self, view: MembershipView) -> str | None:
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

    def assign_shard(self, shard: int, node: int) -> None:
        """Give the place of a shard that was lost to a new node."""
        self.holders.add(shard, node)

    def come(self, shard: int, node: int) -> None:
        """Take a learner that is to hold a shard beside others."""
        self.holders.learners[node] = shard

    def lose(self, node: int) -> None:
        """Take note that a node is gone."""
        self._ready.pop(node, None)
        self.holders.remove(node)


class ReplicaSets:
    """The nodes of every shard, the one that streams first.

    Args:
        shards: the nodes of each to begin with, in the order of the shards.
    """

    def __init__(self, shards: Sequence[Sequence[int]]) -> None:
        self._shards = [list(nodes) for nodes in shards]
        self.learners: dict[int, int] = {}  # the shards of which they are to be nodes

    @property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each shard."""
        return tuple(map(tuple, self._shards))

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes of all shards."""
        return tuple(itertools.chain.from_iterable(self._shards))

    @property
    def lost(self) -> int:
        """How many shards have no node."""
        return sum(not nodes for nodes in self._shards)

    def shard_of(self, node: int) -> int:
        """Return the shard that a node holds."""
        return next(shard for shard, nodes in enumerate(self._shards) if node in nodes)

    def is_last_replica(self, node: int) -> bool:
        """Tell whether a node holds what nobody else does."""
        return [node] in self._shards

    def add(self, shard: int, node: int) -> None:
        """Let a node hold a shard beside those that do."""
        self.learners.pop(node, None)
        self._shards[shard].append(node)

    def remove(self, node: int) -> None:
        """Take a node out, whether it holds a shard or was to."""
        self.learners.pop(node, None)
        for nodes in self._shards:
            if node in nodes:
                nodes.remove(node)

    def rotate_primary(self) -> None:
        """Let another node of every shard stream, where there is one."""
        self._shards = [[*nodes[1:], *nodes[:1]] for nodes in self._shards]
