"""Which nodes hold each shard of the store, as the conductor knows it.

All nodes of a shard hold the same, to the bit, since all do the same: any of them is as good as
the others. One that has come to be another beside them is a newcomer until it has been given a
copy of what they hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


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
        """Tell whether a node holds what nobody else does."""
        return [node] in self._shards

    def add(self, shard: int, node: int) -> None:
        """Let a node hold a shard beside those that do."""
        self.newcomers.pop(node, None)
        self._shards[shard].append(node)

    def remove(self, node: int) -> None:
        """Take a node out, whether it holds a shard or was to."""
        self.newcomers.pop(node, None)
        for nodes in self._shards:
            if node in nodes:
                nodes.remove(node)

    def turn(self) -> None:
        """Let another node of every shard stream, where there is one."""
        self._shards = [[*nodes[1:], *nodes[:1]] for nodes in self._shards]
