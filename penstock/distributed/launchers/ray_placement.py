"""On which node of a Ray cluster the next worker is to be.

Ray's own spreading goes from node to node and does not look where workers are: of two hosts one may
get all that are started again, and with them both replicas of a shard. Here the node with the
fewest of the same role comes next: engines and shards are each spread for themselves, since they
may not find room on the same nodes. A node that died is in Ray's list for half a minute more, so
one on which a worker had to be ended is the last to be chosen for a while.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_DOUBT = 60.0  # seconds; Ray takes about 30 to find that a node is dead


class PlacementPolicy:
    """Chooses nodes."""

    def __init__(self) -> None:
        self._doubted: dict[str, float] = {}  # when a worker had to be ended there
        self._vacated: dict[str, float] = {}  # when a worker was last gone from there

    def gone(self, node: str | None, *, was_ended: bool) -> None:
        """Take note that a worker is gone from a node, by itself or since it had to be ended."""
        if node is not None:
            self._vacated[node] = time.monotonic()
            if was_ended:
                self._doubted[node] = time.monotonic()

    def choose(
        self,
        nodes: Iterable[Mapping[str, Any]],
        wanted: Mapping[str, float],
        alike: Iterable[str | None],
        others: Iterable[str | None] = (),
    ) -> str | None:
        """Return the node for the next worker, None if it is not for us to say.

        Among equals it is the one from which a worker has gone: its replica is elsewhere.

        Args:
            nodes: of the cluster, as `ray.nodes()` says it.
            wanted: what the worker asks for, as Ray names it: `CPU`, `GPU`.
            alike: the node of each worker of its role that runs or is about to.
            others: the node of each other worker.
        """
        found = [node["NodeID"] for node in nodes if node["Alive"] and _is_large(node, wanted)]
        if len(found) < 2:
            return None
        of_role, rest = Counter(alike), Counter(others)
        oldest = time.monotonic() - _DOUBT

        def rank(node: str) -> tuple[bool, int, int, float]:
            return (
                self._doubted.get(node, -math.inf) > oldest,
                of_role[node],
                rest[node],
                -self._vacated.get(node, -math.inf),
            )

        return min(found, key=rank)


def _is_large(node: Mapping[str, Any], wanted: Mapping[str, float]) -> bool:
    has = node["Resources"]
    return all(has.get(name, 0) >= amount for name, amount in wanted.items())
