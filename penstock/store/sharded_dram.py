"""A sharded store in memory; like an unsharded store, it can be saved during training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.store.commit import CommitRule
from penstock.store.holding import Holding
from penstock.store.interface import MemoryStore, OpenSnapshot
from penstock.store.roles import Role, Stored
from penstock.store.sharded import ShardedStore
from penstock.store.sharding import ShardMap


class ShardedDramStore(ShardedStore):
    """A `ShardedStore` whose shards are in memory; arguments are the same."""

    def __init__(
        self,
        program: Holding,
        shard_map: ShardMap,
        shards: Sequence[MemoryStore],
        roles: Sequence[Role],
        rule: CommitRule,
    ) -> None:
        super().__init__(program, shard_map, shards, roles, rule)
        self._in_memory = shards

    def snapshot(self, buffer_bytes: int) -> ShardedSnapshot:
        """Return the state of the present step (`DramStore.snapshot`); shards share the buffer."""
        self._require_whole()
        each = buffer_bytes // len(self._in_memory)
        return ShardedSnapshot(self, [s.snapshot(each) for s in self._in_memory])


class ShardedSnapshot:
    """The state after one step, read from the snapshots of all shards."""

    def __init__(self, store: ShardedDramStore, snapshots: Sequence[OpenSnapshot]) -> None:
        self.program, self.step = store.program, store.step
        self._roles_of = store.roles
        self._shard_map = store.shard_map
        self._snapshots = snapshots

    def roles(self, name: str) -> Mapping[str, Stored]:
        """Return the arrays of a weight: its master, then its state."""
        return self._roles_of(name)

    def pieces(self, name: str, role: str, piece_elements: int) -> Iterator[np.ndarray]:
        """Yield a tensor, flat, in pieces; each is valid until the next (`Snapshot.pieces`)."""
        for piece in self._shard_map.pieces[name]:
            yield from self._snapshots[piece.shard].pieces(name, role, piece_elements)

    def close(self) -> None:
        """Release the snapshot in all shards."""
        for snapshot in self._snapshots:
            snapshot.close()

    @property
    def is_closed(self) -> bool:
        """Whether the snapshot no longer delays any update."""
        return all(snapshot.is_closed for snapshot in self._snapshots)
