"""At which step all shards stand: each says which it holds, all go back to the newest in common."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import StorageError


class Agreement:
    """What shards have said of the steps that they hold.

    Args:
        shards: in their order.
    """

    def __init__(self, shards: Sequence[int]) -> None:
        self._shards = tuple(shards)
        self._held: dict[int, set[int]] = {}
        self._gone_back: set[int] = set()

    def hold(self, shard: int, steps: Sequence[int]) -> bool:
        """Take which steps a shard holds; return whether all have said so by now."""
        self._held[shard] = {*steps}
        return len(self._held) == len(self._shards)

    def newest(self, before: int) -> int:
        """Return the newest step that all shards hold, best before the one to be made.

        Raises:
            StorageError: there is none.
        """
        common = set.intersection(*self._held.values())
        if not common:
            held = ", ".join(
                f"shard {place} has {sorted(self._held[shard])}"
                for place, shard in enumerate(self._shards)
            )
            raise StorageError(f"no step is held by all shards ({held}); resume from a checkpoint")
        # The step in flight may be stored everywhere; but its losses were never reported.
        return max([step for step in common if step < before] or common)

    def go_back(self, shard: int) -> bool:
        """Take note that a shard stands there; return whether all do."""
        self._gone_back.add(shard)
        return len(self._gone_back) == len(self._shards)

    @property
    def missing(self) -> list[int]:
        """Who has not answered to what was asked last."""
        said = self._gone_back if len(self._held) == len(self._shards) else {*self._held}
        return [shard for shard in self._shards if shard not in said]
