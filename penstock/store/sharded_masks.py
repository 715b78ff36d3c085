"""The masks of a store in shards: joined for engines, cut for shards, decided over all shards.

Masks are cut where weights are, at whole granules, so a shard's part of a mask is a mask of its
own. Whole masks are kept here until they change: engines need them, and they say where the entries
of each shard begin.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch

from penstock.errors import ClusterError, StorageError
from penstock.kernels.blocks import GRANULE
from penstock.sparsity import (
    Histogram,
    PackedIndex,
    Selection,
    SparseWeight,
    compact_bytes,
    empty_index,
    joined,
    merged_histogram,
    narrowed,
)
from penstock.store.holding import Holding, home_stages
from penstock.store.interface import Decision, Store
from penstock.store.mask_plan import MaskPlan, OpenSelection
from penstock.store.mask_rule import MaskRule
from penstock.store.masks import require_room
from penstock.store.packed import index_memory
from penstock.store.roles import CHANGES, INDEX
from penstock.store.sharding import HeldRange, Piece, ShardMap, entries_of, entry_spans


class SparseShard(Store, Protocol):
    """A shard that may hold parts of sparse weights; see `DramStore`."""

    def mask(self, name: str) -> PackedIndex | None: ...

    def histograms(self, selections: Sequence[OpenSelection]) -> Sequence[Histogram]: ...

    def settle(self, name: str, grow: Selection) -> None: ...

    def finish_restore(self, step: int, updates: int | None = None) -> None: ...


@runtime_checkable
class HeldSparseShard(SparseShard, Protocol):
    """Such a shard in this process."""

    def needs_dense_gradient(self, name: str) -> bool: ...


def sparse_shard(store: Store) -> HeldSparseShard:
    """Return the store of a shard as one that can have sparse weights.

    **Raises:** `ClusterError` if it is of a type that cannot have them.
    """
    if not isinstance(store, HeldSparseShard):
        raise ClusterError(
            f"{store.program.name}: expected a store that can have sparse weights, got "
            f"{type(store).__name__}; do all nodes run the same version of Penstock?"
        )
    return store


class ShardedMasks:
    """The masks of all shards; empty if no weight is sparse.

    Args:
        program, shard_map, shards: as for `ShardedStore`.
        rule: decides the masks; None if the store neither loads dense weights nor trains.
    """

    def __init__(
        self,
        program: Holding,
        shard_map: ShardMap,
        shards: Sequence[Store],
        rule: MaskRule | None,
    ) -> None:
        self._program, self._map = program, shard_map
        self._specs = {name: spec for name, spec in program.weights.items() if spec.is_sparse}
        self._pieces = {name: shard_map.pieces[name] for name in self._specs}
        # A shard of a type that cannot hold sparse weights has refused them.
        self._shards = cast("Sequence[SparseShard]", shards)
        self.rule = rule
        home = home_stages(program)
        trained = [name for name in home if name in self._specs and self._specs[name].trainable]
        self.plan = MaskPlan(self._specs, trained, rule)
        self._uses = Counter(name for stage in program.stages for name in stage.weights)
        self._whole: dict[str, PackedIndex] = {}
        self._unknown: set[str] = set()  # weights whose numbers of entries are not those of a step
        self._updates: int | None = None
        self._settled: dict[str, Selection] = {}
        self._arrived = Counter[str]()

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    @property
    def memory_bytes(self) -> dict[str, int]:
        """The most memory of masks that are put together."""
        size = whole_masks_bytes(self._program, self._map)
        return {"whole masks": size} if size else {}

    def resume(self) -> None:
        """Take the masks of shards that were opened with content, all at one step."""
        self._whole.clear()
        for name, pieces in self._pieces.items():
            found = [self._shards[piece.shard].mask(name) for piece in pieces]
            parts = [part for part in found if part is not None]
            self._unknown.add(name)
            self._join(name, parts)

    def forget(self) -> None:
        """Forget masks and plans: the shards may go back to an earlier step."""
        self._whole.clear()
        self._unknown = set(self._specs)
        self.plan.begin()
        self.discard()

    # --- one step ---------------------------------------------------------------------------------

    def index(self, name: str) -> PackedIndex:
        """Return the mask of a weight, after any pending update; it is empty before a load."""
        if not self.plan.kept[name] and name not in self._unknown:
            return empty_index(self._specs[name].elements)
        if name not in self._whole:
            parts = [self._shards[piece.shard].mask(name) for piece in self._pieces[name]]
            self._join(name, [part for part in parts if part is not None])
        return self._whole[name]

    def put_together(
        self, name: str, parts: Sequence[SparseWeight], place: np.ndarray | None
    ) -> SparseWeight:
        """Return a weight as engines get it.

        Args:
            name: its name.
            parts: those of the shards, in order.
            place: memory for its values, bytes; None for a weight in a single shard.
        """
        if name not in self._whole:
            self._join(name, [part.index for part in parts])
        first, index = parts[0], self._whole[name]
        kept = sum(part.index.kept for part in parts)
        if {part.version for part in parts} != {first.version} or kept != index.kept:
            raise StorageError(
                f"{name}: expected {index.kept} entries after {first.version} changes of its mask "
                f"in all shards, got {kept} after {[part.version for part in parts]}; open the run "
                "again: it continues from its last checkpoint"
            )
        values = first.values
        if place is not None:
            room = torch.from_numpy(place).view(values.dtype)
            values = torch.cat([part.values for part in parts], out=room[: index.kept])
        asks, version = first.dense_gradient, first.version
        return SparseWeight(name, self._specs[name].shape, values, index, version, asks)

    def _join(self, name: str, parts: Sequence[PackedIndex]) -> None:
        index = parts[0] if len(parts) == 1 else joined(list(parts))
        if name in self._unknown:
            self._know({name: index.kept})
        if index.kept != self.plan.kept[name]:
            raise StorageError(
                f"{name}: expected {self.plan.kept[name]} entries in all shards together, got "
                f"{index.kept}; open the run again: it continues from its last checkpoint"
            )
        self._whole[name] = index

    def _know(self, kept: Mapping[str, int]) -> None:
        """Set numbers of entries, as the shards report them."""
        self.plan.kept.update(kept)
        self._unknown.difference_update(kept)

    def entries_of(self, name: str, piece: Piece, group: int = 1) -> slice:
        """Return where a piece's values are among those of the whole weight; `group` entries of a
        granule share a value."""
        return entries_of(self.index(name), piece, group)

    def received(self, names: Iterable[str], step: int) -> None:
        """Select the entries that a step grows in weights whose dense gradients have arrived in all
        shards."""
        for name in names:
            if not self.plan.needs_dense_gradient(name, step):
                continue
            self._arrived[name] += 1
            if self._arrived[name] == self._uses[name]:
                self._settle(name, step)

    def _settle(self, name: str, step: int) -> None:
        update = self.plan.update_at(step)
        for change in update.changes if update is not None else ():
            if change.weight != name:
                continue
            assert update is not None
            _, grow = update.selections(self.plan.seed, change)
            shards = [self._shards[piece.shard] for piece in self._pieces[name]]
            while not grow.is_decided:
                opened = OpenSelection(name, "grow", grow)
                merged = merged_histogram([shard.histograms([opened])[0] for shard in shards])
                if merged.counts.sum() < grow.remaining:
                    return  # a gradient is not finite, or missing: the step cannot be committed
                grow = narrowed(grow, merged)
            for shard in shards:
                shard.settle(name, grow)
            self._settled[name] = grow

    def discard(self) -> None:
        """Forget what was selected since the last commit."""
        self._settled.clear()
        self._arrived.clear()

    def parts_in(self, shard: int) -> dict[str, int]:
        """Return the elements of a shard's parts of sparse weights, in the program's order."""
        return {
            name: piece.elements
            for name, pieces in self._pieces.items()
            for piece in pieces
            if piece.shard == shard
        }

    def reported(self, kept: Sequence[Mapping[str, int]]) -> Mapping[str, int]:
        """Take the numbers of entries that the shards hold before a step; return those of whole
        weights."""
        found = sum(map(Counter, kept), Counter[str]())
        whole = {name: found[name] for name in self._specs}
        self._know(whole)
        return whole

    def decide(self, decision: Decision) -> Decision:
        """Return a decision with the changes of masks, selected over the entries of all shards.

        Raises:
            ConfigError: a mask would keep no entry.
            NonFiniteError: the value of an entry is NaN or infinite.
        """
        rounds = self.plan.selection_rounds(decision.step, self._settled)
        if rounds is None:
            return decision
        while selections := rounds.open_selections:
            rounds.narrow([shard.histograms(selections) for shard in self._shards])
        return rounds.decided(decision)

    def follow(self, decision: Decision) -> None:
        """Record a decision that all shards have accepted."""
        self.plan.accept(decision)
        for change in decision.masks:
            self._whole.pop(change.weight, None)
        self.discard()

    # --- reading and restoring --------------------------------------------------------------------

    def spans(self, name: str, group: int, begin: int, end: int) -> Iterator[HeldRange]:
        """Yield where values `begin` to `end` of a role of a weight are, in order."""
        return entry_spans(self.index(name), self._pieces[name], group, begin, end)

    def compact(self, name: str) -> np.ndarray:
        """Return the mask of a weight in its compact form, uint8."""
        return np.frombuffer(compact_bytes(self.index(name)), np.uint8)

    def begin_restore(self) -> None:
        """Forget everything; masks are set by `take`."""
        self.plan.begin()
        self.plan.kept = dict.fromkeys(self._specs, 0)
        self._unknown.clear()
        self._whole.clear()
        self._updates = None
        self.discard()

    def take(self, name: str, index: PackedIndex) -> None:
        """Set the mask of a weight, during a restore and before its values.

        **Raises:** `ConfigError` if it keeps more entries than the weight may have.
        """
        require_room(name, index, self._specs[name].capacity)
        self.plan.kept[name], self._whole[name] = index.kept, index
        for piece in self._pieces[name]:
            part = index.cut(piece.begin // GRANULE, -(-piece.end // GRANULE))
            data = np.frombuffer(compact_bytes(part), np.uint8)
            self._shards[piece.shard].write(name, INDEX, 0, data)

    def write_changes(self, name: str, begin: int, values: np.ndarray) -> None:
        """Take the numbers of updates at the changes of a mask; every shard has all of them."""
        if begin == 0:
            self._updates = int(values[0])
        for piece in self._pieces[name]:
            self._shards[piece.shard].write(name, CHANGES, begin, values)

    def finish_restore(self, step: int) -> None:
        """Finish the restore of all shards."""
        for shard in self._shards:
            shard.finish_restore(step, self._updates)


def whole_masks_bytes(program: Holding, shard_map: ShardMap) -> int:
    """Return the most memory of masks that are put together; 0 if no sparse weight is cut."""
    sparse = (weight for weight in program.weights.values() if weight.is_sparse)
    cut = (weight for weight in sparse if len(shard_map.pieces[weight.name]) > 1)
    return sum(index_memory(weight.capacity, weight.elements) for weight in cut)


def masked_gradients(
    masks: ShardedMasks, names: Iterable[str], step: int
) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of gradients that have one number per kept entry."""
    return {
        name: (masks.index(name).kept,)
        for name in names
        if name in masks and not masks.plan.needs_dense_gradient(name, step)
    }
