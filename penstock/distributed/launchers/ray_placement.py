"""Placement of workers on the nodes of a Ray cluster.

Ray's own SPREAD strategy goes from node to node and ignores where workers run. With two hosts, one
may get all restarted workers, and so both replicas of a shard. This policy chooses the node with
the fewest workers of the same role. Engines and shards are each spread separately, since they may
not fit on the same nodes. A relay goes to the node with the fewest workers of any role, whose link
has most to spare: to nodes without an engine first. Ray lists a dead node for another half minute,
so a node on which a worker had to be killed is chosen last for a while.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_SUSPECT_SECONDS = 60.0  # seconds; Ray takes about 30 to detect that a node is dead


class PlacementPolicy:
    """Chooses the node of the next worker."""

    def __init__(self) -> None:
        self._suspect_since: dict[str, float] = {}  # when a worker had to be killed on a node
        self._vacated_at: dict[str, float] = {}  # when a worker last left a node

    def worker_left(self, node: str | None, *, was_ended: bool) -> None:
        """Record that a worker left a node, by itself or because it had to be killed."""
        if node is not None:
            self._vacated_at[node] = time.monotonic()
            if was_ended:
                self._suspect_since[node] = time.monotonic()

    def choose(
        self,
        nodes: Iterable[Mapping[str, Any]],
        wanted: Mapping[str, float],
        alike: Iterable[str | None],
        others: Iterable[str | None] = (),
    ) -> str | None:
        """Return the node for the next worker; None leaves the choice to Ray.

        Among equal nodes, the node that a worker has left is chosen: the other replica is
        elsewhere.

        Args:
            nodes: of the cluster, in the format of `ray.nodes()`.
            wanted: the requested resources, under Ray's names: `CPU`, `GPU`.
            alike: the node of each running or requested worker of the same role.
            others: the node of each other worker.
        """
        found = [node["NodeID"] for node in nodes if node["Alive"] and _is_large(node, wanted)]
        if len(found) < 2:
            return None
        of_role, rest = Counter(alike), Counter(others)
        oldest = time.monotonic() - _SUSPECT_SECONDS

        def rank(node: str) -> tuple[bool, int, int, float]:
            return (
                self._suspect_since.get(node, -math.inf) > oldest,
                of_role[node],
                rest[node],
                -self._vacated_at.get(node, -math.inf),
            )

        return min(found, key=rank)


def _is_large(node: Mapping[str, Any], wanted: Mapping[str, float]) -> bool:
    has = node["Resources"]
    return all(has.get(name, 0) >= amount for name, amount in wanted.items())
