"""A sharded store in memory; like an unsharded store, it can be saved during training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.sparsity import compact_bytes, index_from_compact, joined
from penstock.store.commit import CommitRule
from penstock.store.holding import Holding
from penstock.store.interface import MemoryStore, OpenSnapshot
from penstock.store.mask_rule import MaskRule
from penstock.store.roles import CHANGES, INDEX, VALUES, Role, Stored
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
        masks: MaskRule | None = None,
    ) -> None:
        super().__init__(program, shard_map, shards, roles, rule, masks)
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
        self._specs = store.program.weights
        # The roles of a sparse weight have the shapes of its present mask.
        self._roles = {name: store.roles(name) for name in self._specs}
        self._shard_map = store.shard_map
        self._snapshots = snapshots

    def roles(self, name: str) -> Mapping[str, Stored]:
        """Return the arrays of a weight: its master, then its state."""
        return self._roles[name]

    def pieces(self, name: str, role: str, piece_elements: int) -> Iterator[np.ndarray]:
        """Yield a tensor, flat, in pieces; each is valid until the next (`Snapshot.pieces`)."""
        pieces = self._shard_map.pieces[name]
        if role == INDEX and len(pieces) > 1:
            data = self._mask(name)
            for begin in range(0, data.size, piece_elements):
                yield data[begin : begin + piece_elements]
            return
        for piece in pieces[:1] if role == CHANGES else pieces:
            yield from self._snapshots[piece.shard].pieces(name, role, piece_elements)

    def _mask(self, name: str) -> np.ndarray:
        """Return the mask of a weight in several shards in its compact form."""
        parts = []
        for piece in self._shard_map.pieces[name]:
            snapshot = self._snapshots[piece.shard]
            shape = {role: snapshot.roles(name)[role].shape[0] for role in (INDEX, VALUES)}
            data = b"".join(part.tobytes() for part in snapshot.pieces(name, INDEX, shape[INDEX]))
            parts.append(index_from_compact(data, piece.elements, shape[VALUES], piece.begin))
        return np.frombuffer(compact_bytes(joined(parts)), np.uint8)

    def close(self) -> None:
        """Release the snapshot in all shards."""
        for snapshot in self._snapshots:
            snapshot.close()

    @property
    def is_closed(self) -> bool:
        """Whether the snapshot no longer delays any update."""
        return all(snapshot.is_closed for snapshot in self._snapshots)
