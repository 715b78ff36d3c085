"""The nodes of an epoch, in order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ProtocolError


@dataclass(frozen=True)
class MembershipView:
    """The replicas of every shard, the engines and the relays of an epoch, by node number.

    The order of shards, engines and relays is their position in the trees. All replicas of a shard
    hold the same state and do the same work; the first replica streams the weights.
    """

    shards: tuple[tuple[int, ...], ...]
    engines: tuple[int, ...]
    relays: tuple[int, ...] = ()

    @property
    def shard_nodes(self) -> tuple[int, ...]:
        """The replicas of all shards."""
        return tuple(itertools.chain.from_iterable(self.shards))

    @property
    def nodes(self) -> tuple[int, ...]:
        """All nodes: engines, relays, replicas."""
        return (*self.engines, *self.relays, *self.shard_nodes)

    def shard_of(self, node: int) -> int:
        """Return the shard that a node holds a replica of."""
        return next(shard for shard, nodes in enumerate(self.shards) if node in nodes)

    def as_body(self) -> dict[str, Any]:
        """Return the view as the body of a message."""
        return {
            "shards": [list(nodes) for nodes in self.shards],
            "engines": list(self.engines),
            "relays": list(self.relays),
        }

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> MembershipView:
        """Return the view in the body of a message.

        **Raises:** `ProtocolError` if the body has no valid view.
        """
        shards, engines, relays = body.get("shards"), body.get("engines"), body.get("relays", [])
        if not isinstance(shards, list) or not shards:
            raise ProtocolError(f"expected a view with a list of shards, got {str(shards)[:80]!r}")
        numbers: list[int] = []
        for nodes in (*shards, engines, relays):
            is_list = isinstance(nodes, list) and (nodes or nodes is relays)
            if not is_list or not all(type(n) is int for n in nodes):
                raise ProtocolError(f"a view has {str(nodes)[:80]!r} as nodes, expected numbers")
            numbers += nodes
        if len({*numbers}) < len(numbers):
            raise ProtocolError(f"a view names a node twice: {str(numbers)[:80]}")
        return cls(tuple(map(tuple, shards)), tuple(engines or ()), tuple(relays))
