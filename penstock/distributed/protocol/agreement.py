"""At which step all shards stand: each says which it holds, all go back to the newest in common."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from penstock.errors import StorageError


class Agreement:
    """What shards have said of the steps that they hold.

    Args:
        shards: the nodes of each, in the order of the shards. A shard holds what any of them holds.
    """

    def __init__(self, shards: Sequence[Sequence[int]]) -> None:
        self._shards = [tuple(nodes) for nodes in shards]
        self._nodes = tuple(itertools.chain.from_iterable(shards))
        self._held: dict[int, set[int]] = {}
        self._gone_back: set[int] = set()

    def hold(self, node: int, steps: Sequence[int]) -> bool:
        """Take which steps a node holds; return whether all have said so by now."""
        self._held[node] = {*steps}
        return len(self._held) == len(self._nodes)

    def newest(self, before: int) -> int:
        """Return the newest step that all shards hold, best before the one to be made.

        Raises:
            StorageError: there is none.
        """
        by_shard = [set().union(*(self._held[node] for node in nodes)) for nodes in self._shards]
        common = set.intersection(*by_shard)
        if not common:
            held = ", ".join(f"shard {n} has {sorted(steps)}" for n, steps in enumerate(by_shard))
            raise StorageError(f"no step is held by all shards ({held}); resume from a checkpoint")
        # The step in flight may be stored everywhere; but its losses were never reported.
        return max([step for step in common if step < before] or common)

    def without(self, step: int) -> list[int]:
        """Return the nodes that do not hold a step which another of their shard holds."""
        return [node for node in self._nodes if step not in self._held[node]]

    def go_back(self, node: int) -> bool:
        """Take note that a node stands there; return whether all do."""
        self._gone_back.add(node)
        return len(self._gone_back) == len(self._nodes)

    @property
    def missing(self) -> list[int]:
        """Who has not answered to what was asked last."""
        said = self._gone_back if len(self._held) == len(self._nodes) else {*self._held}
        return [node for node in self._nodes if node not in said]
