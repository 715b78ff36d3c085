"""Which nodes hold each shard of the store, as the conductor knows it.

All nodes of a shard hold the same, to the bit, since all do the same: any of them is as good as
the others. One that has come to be another beside them is a newcomer until it has been given a
copy of what they hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from penstock.errors import CorruptionError


class Holders:
    """The nodes of every shard, the one that streams first.

    Args:
        shards: the nodes of each to begin with, in the order of the shards.
    """

    def __init__(self, shards: Sequence[Sequence[int]]) -> None:
        self._shards = [list(nodes) for nodes in shards]
        self.newcomers: dict[int, int] = {}  # the shards of which they are to be nodes

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

    def is_last(self, node: int) -> bool:
        """Tell whether nobody else holds what a node does."""
        return len(self._shards[self.shard_of(node)]) == 1

    def add(self, shard: int, node: int) -> None:
        """Let a node hold a shard beside those that do."""
        self.newcomers.pop(node, None)
        self._shards[shard].append(node)

    def remove(self, node: int) -> Sequence[int]:
        """Take a node out; return those that are left of its shard."""
        nodes = self._shards[self.shard_of(node)]
        nodes.remove(node)
        return tuple(nodes)

    def turn(self) -> None:
        """Let another node of every shard stream, where there is one."""
        self._shards = [[*nodes[1:], *nodes[:1]] for nodes in self._shards]

    def behind(self, done: Collection[int]) -> list[int]:
        """Return the nodes that have not done what all shards have; none where a shard has not."""
        if not all(any(node in done for node in nodes) for nodes in self._shards):
            return []
        return [node for node in self.nodes if node not in done]

    def agreed(self, said: Mapping[int, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return for each shard what all its nodes have said.

        Raises:
            CorruptionError: two nodes of a shard have said different things.
        """
        for shard, (first, *others) in enumerate(self._shards):
            for other in others:
                if said[other] != said[first]:
                    raise CorruptionError(
                        f"shard {shard}: node {first} and its replica, node {other}, should hold "
                        "the same and do not say the same of a step's gradients, which was not "
                        "committed: the memory or the processor of one of their hosts is faulty. "
                        "Test them, and give the same command again; the run goes on from the "
                        "last step that is safe"
                    )
        return [said[nodes[0]] for nodes in self._shards]

    def common_step(self, held: Mapping[int, Collection[int]], before: int) -> int | None:
        """Return the newest step that a node of every shard holds, best one before `before`."""
        by_shard = [set().union(*(held[node] for node in nodes)) for nodes in self._shards]
        common = set.intersection(*by_shard)
        return max([step for step in common if step < before] or common, default=None)

    def describe(self, held: Mapping[int, Collection[int]]) -> str:
        """Return which steps there are of each shard, for people."""
        return ", ".join(
            f"shard {shard} has {sorted(set().union(*(held[node] for node in nodes)))}"
            for shard, nodes in enumerate(self._shards)
        )
