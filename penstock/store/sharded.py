"""A store made of shards: each shard holds a part of every weight; together they act as one store.

Weights in a single shard are streamed in place. The pieces of other weights are assembled in memory
of this store. Gradients are split and forwarded to the shards. A commit has two phases, so that the
norm covers all gradients and no shard decides before all shards are able to. Shards are used only
through the methods of `Store`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.errors import StorageError
from penstock.kernels.memory import allocate, page_lock
from penstock.program import WeightSpec, largest_stage
from penstock.spans import Spans
from penstock.sparsity import MaskSize, PackedIndex, SparseWeight, StreamedWeight
from penstock.store.commit import CommitRule, commit_by
from penstock.store.content_hash import hash_read
from penstock.store.gradients import require_gradients, trainable_weights
from penstock.store.holding import Holding, home_stages
from penstock.store.incoming import checked_weights
from penstock.store.interface import Commit, Decision, FlashTraffic, Store, Traffic
from penstock.store.layout import ALIGNMENT_BYTES
from penstock.store.mask_rule import MaskRule
from penstock.store.norm import GradientReport, merged
from penstock.store.roles import CHANGES, INDEX, MASTER, VALUES, Role, Stored, stored_of
from penstock.store.sharded_masks import ShardedMasks, masked_gradients
from penstock.store.sharding import HeldRange, ShardMap


class ShardedStore:
    """The weights and the state of one program, in several stores. Called from one thread.

    Args:
        program: names the weights, their shapes and the stages that use them.
        shard_map: maps pieces to shards.
        shards: the stores, each of `shard_map.part(program, number)`.
        roles: the optimizer's arrays of every trainable weight.
        rule: decides the steps that are committed.
        masks: decides the masks of sparse weights; needed to load them, and to train them.
    """

    def __init__(
        self,
        program: Holding,
        shard_map: ShardMap,
        shards: Sequence[Store],
        roles: Sequence[Role],
        rule: CommitRule,
        masks: MaskRule | None = None,
    ) -> None:
        self.program = program
        self.shard_map, self.shards, self._rule = shard_map, shards, rule
        self._roles = {role.name: role for role in roles}
        self._trainable = tuple(n for n in home_stages(program) if program.weights[n].trainable)
        self.masks = ShardedMasks(program, shard_map, shards, masks)
        self._assembly = Assembly(Assembly.needed(program, shard_map))

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self.shards[0].step

    @property
    def memory_bytes(self) -> Mapping[str, int]:
        """Maximum memory of all shards, by use."""
        total = Counter[str](assembly=self._assembly.bytes)
        for shard in self.shards:
            total.update(shard.memory_bytes)
        return {**total, **self.masks.memory_bytes}

    @property
    def flash_bytes(self) -> int:
        """Bytes of all shards on flash."""
        return sum(shard.flash_bytes for shard in self.shards)

    @property
    def flash_rule(self) -> FlashTraffic:
        """Maximum flash traffic of a step over all shards."""
        return _sum_of(shard.flash_rule for shard in self.shards)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, by name."""
        return {name: spec.shape for name, spec in self.program.weights.items()}

    def page_lock(self) -> bool:
        """Page-lock the streamed memory for engines on a GPU (`DramStore.page_lock`)."""
        locked = [shard.page_lock() for shard in self.shards]  # every shard locks
        return self._assembly.page_lock() and all(locked)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill all masters, one weight at a time, and begin at step 0 (`DramStore.load`)."""
        self.begin_restore()
        for name, values in checked_weights(self.program, weights):
            if name in self.masks:
                self._load_sparse(name, values)
                self.clear_state(name)  # last: shards on flash then write their parts
            else:
                self.clear_state(name)
                self.write(name, MASTER, 0, values)
        self.finish_restore(0)

    def _load_sparse(self, name: str, values: np.ndarray) -> None:
        rule, spec = self.masks.rule, self.program.weights[name]
        if rule is None:
            raise ValueError(f"{name}: a store needs a mask rule to load sparse weights")
        index = rule.initial(name, spec.shape, values)
        self.masks.take(name, index)
        self.write(name, VALUES, 0, values[index.positions()])
        if spec.trainable:
            self.write(name, CHANGES, 0, np.zeros(1, np.int64))

    # One step

    def fetch(self, stage: int, positions: Sequence[int] | None = None) -> list[StreamedWeight]:
        """Return the weights of a stage, after any pending update.

        As `DramStore.fetch`, but the views are valid only until the second fetch after this one.
        """
        self._require_whole()
        names = self.program.stages[stage].weights
        chosen = names if positions is None else [names[position] for position in positions]
        found = []
        for shard in self.shards:
            here = shard.program.stages[stage].weights
            wanted = [name for name in chosen if name in here]
            views = shard.fetch(stage, [here.index(name) for name in wanted])
            found.append(dict(zip(wanted, views, strict=True)))
        return self._put_together(chosen, found)

    def stream(self, names: Sequence[str]) -> list[StreamedWeight]:
        """Return weights by name, as `fetch` does by stage; used by another program of the
        model."""
        self._require_whole()
        found = []
        for shard in self.shards:
            wanted = [name for name in names if name in shard.program.weights]
            views = shard.stream(wanted)
            found.append(dict(zip(wanted, views, strict=True)))
        return self._put_together(names, found)

    def _put_together(
        self, names: Sequence[str], found: Sequence[Mapping[str, StreamedWeight]]
    ) -> list[StreamedWeight]:
        cut = [
            _value_bytes(self.program.weights[n])
            for n in names
            if len(self.shard_map.pieces[n]) > 1
        ]
        places = self._assembly.places(cut)
        weights: list[StreamedWeight] = []
        for name in names:
            spec, pieces = self.program.weights[name], self.shard_map.pieces[name]
            place = next(places) if len(pieces) > 1 else None
            parts = [found[piece.shard][name] for piece in pieces]
            if name in self.masks:
                sparse = [part for part in parts if isinstance(part, SparseWeight)]
                weights.append(self.masks.put_together(name, sparse, place))
                continue
            dense = [part for part in parts if isinstance(part, torch.Tensor)]
            whole = dense[0]
            if place is not None:
                whole = torch.from_numpy(place).view(spec.stream_dtype)
                for piece, part in zip(pieces, dense, strict=True):
                    whole[piece.begin : piece.end].copy_(part)
            weights.append(whole.view(spec.shape))
        return weights

    def receive(self, stage: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Accept the gradients of one stage, summed over the whole batch (`DramStore.receive`)."""
        self._require_whole()
        names, masks = trainable_weights(self.program, self.program.stages[stage]), self.masks
        packed = masked_gradients(masks, names, self.step + 1)
        require_gradients(self.program, stage, gradients, packed)
        flat = {
            name: None if gradient is None else gradient.detach().contiguous().view(-1)
            for name, gradient in zip(names, gradients, strict=True)
        }
        for number, shard in enumerate(self.shards):
            here = [
                None
                if (whole := flat[name]) is None
                else whole[masks.entries_of(name, piece)]
                if name in packed
                else whole[piece.begin : piece.end].view(shard.program.weights[name].shape)
                for name in names
                for piece in self.shard_map.pieces[name]
                if piece.shard == number
            ]
            if here:
                shard.receive(stage, here)
        masks.received(names, self.step + 1)

    def commit(self) -> Commit:
        """Decide the step in all shards (`DramStore.commit`)."""
        return commit_by(self._rule, self, self.masks.decide)

    def prepare(self) -> GradientReport:
        """Return the report on the step's gradients; every shard is then ready to decide."""
        self._require_whole()
        return merged(self.program, [shard.prepare() for shard in self.shards])

    def decide(self, decision: Decision) -> None:
        """Commit the step in every shard (`DramStore.decide`)."""
        self.masks.plan.require(decision)
        for shard in self.shards:
            shard.decide(decision)
        self.masks.follow(decision)

    def _require_whole(self) -> None:
        steps = sorted({shard.step for shard in self.shards})
        if len(steps) > 1:
            raise StorageError(
                f"the commit of step {steps[-1]} was interrupted between two shards, so the "
                "weights are not those of a complete step; open the run again: it continues from "
                "the last step that all shards hold"
            )

    def discard(self) -> None:
        """Discard the gradients received since the last commit; the step may be replayed."""
        for shard in self.shards:
            shard.discard()
        self.masks.discard()

    def flush(self) -> None:
        """Apply all pending updates now."""
        for shard in self.shards:
            shard.flush()

    def unchanged(self) -> tuple[str, ...]:
        """Return the trainable weights that no update has changed (`DramStore.unchanged`)."""
        found = [frozenset(shard.unchanged()) for shard in self.shards]
        return tuple(
            name
            for name in self._trainable
            if all(name in found[piece.shard] for piece in self.shard_map.pieces[name])
        )

    @property
    def spans(self) -> Sequence[Spans]:
        """The measurements of the shards in this process."""
        return [spans for shard in self.shards for spans in shard.spans]

    def take_traffic(self) -> Traffic:
        """Return bytes streamed and received, and waiting times, since the last call."""
        taken = [shard.take_traffic() for shard in self.shards]
        return Traffic(
            sum(traffic.streamed_bytes for traffic in taken),
            sum(traffic.gradient_bytes for traffic in taken),
            sum(traffic.update_seconds for traffic in taken),
            sum(traffic.snapshot_seconds for traffic in taken),
        )

    def take_flash_traffic(self) -> FlashTraffic:
        """Return bytes moved to and from flash, and the waiting time for them, since the last
        call."""
        return _sum_of(shard.take_flash_traffic() for shard in self.shards)

    def remember(self, extra: Mapping[str, Any]) -> None:
        """Keep plain data with the present step, in every shard."""
        for shard in self.shards:
            shard.remember(extra)

    def close(self) -> None:
        """Close all shards."""
        for shard in self.shards:
            shard.close()

    # Reading and restoring state

    def master(self, name: str) -> torch.Tensor:
        """Return a copy of a weight, float32 in its shape."""
        self._require_whole()
        shards = [self.shards[piece.shard] for piece in self.shard_map.pieces[name]]
        parts = [shard.master(name).view(-1) for shard in shards]
        return torch.cat(parts).view(self.program.weights[name].shape)

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return copies of a weight's optimizer state by role, in the shapes of a checkpoint."""
        self._require_whole()
        parts = [self.shards[piece.shard].state(name) for piece in self.shard_map.pieces[name]]
        stored = self.roles(name)
        return {
            role: torch.cat([part[role].view(-1) for part in parts]).view(stored[role].shape)
            for role in stored
            if role not in (MASTER, VALUES, INDEX, CHANGES)
        }

    def roles(self, name: str) -> dict[str, Stored]:
        """Return the arrays of a weight that `read` and `write` accept: its master, then its
        state."""
        spec = self.program.weights[name]
        if name in self.masks:
            return self._sparse_roles(name)
        return stored_of(spec, self._roles.values() if spec.trainable else ())

    def _sparse_roles(self, name: str) -> dict[str, Stored]:
        parts = [self.shards[piece.shard].roles(name) for piece in self.shard_map.pieces[name]]
        found = {}
        for role, first in parts[0].items():
            shape: tuple[int, ...] = (sum(part[role].shape[0] for part in parts),)
            if role == INDEX:
                shape = self.masks.compact(name).shape
            elif role == CHANGES:
                shape = first.shape
            found[role] = Stored(first.dtype, shape)
        return found

    def mask(self, name: str) -> PackedIndex | None:
        """Return the mask of a weight, after any pending update; None if the weight is dense."""
        self._require_whole()
        return self.masks.index(name) if name in self.masks else None

    @property
    def mask_sizes(self) -> Mapping[str, MaskSize]:
        """The sizes of all masks after the last commit."""
        return self.masks.plan.sizes

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return values `begin` to `end` of a weight or of its state, flat; maybe a view."""
        self._require_whole()
        if role == INDEX:
            return self.masks.compact(name)[begin:end]
        if role == CHANGES:
            first = self.shard_map.pieces[name][0]
            return self.shards[first.shard].read(name, role, begin, end)
        parts = [
            self.shards[span.shard].read(name, role, span.begin, span.end)
            for span in self._spans(name, role, begin, end)
        ]
        if len(parts) > 1:
            return np.concatenate(parts)
        return parts[0] if parts else np.empty(0, self._role(role).numpy)

    def begin_restore(self) -> None:
        """Discard everything; the store is unusable until `finish_restore`."""
        for shard in self.shards:
            shard.begin_restore()
        self.masks.begin_restore()

    def take_mask(self, name: str, index: PackedIndex) -> None:
        """Set the mask of a sparse weight, during a restore and before its values.

        **Raises:** `ConfigError` if it keeps more entries than the weight may have.
        """
        self.masks.take(name, index)

    def write(self, name: str, role: str, begin: int, values: np.ndarray) -> None:
        """Overwrite values of a weight or of its state, during a restore; each value once. The mask
        of a sparse weight is set by `take_mask`, before."""
        if role == INDEX:
            return
        if role == CHANGES:
            self.masks.write_changes(name, begin, values)
            return
        for span in self._spans(name, role, begin, begin + values.size):
            self.shards[span.shard].write(name, role, span.begin, values[span.there])

    def clear_state(self, name: str) -> None:
        """Set the optimizer state of a weight to zero, during a restore."""
        for piece in self.shard_map.pieces[name]:
            self.shards[piece.shard].clear_state(name)

    def finish_restore(self, step: int) -> None:
        """Make the store usable; its content is the state after `step` commits."""
        if any(name in self.masks for name in self.program.weights):
            self.masks.finish_restore(step)
            return
        for shard in self.shards:
            shard.finish_restore(step)

    def content_hash(self) -> str:
        """Return a hash of all weights (`content_hash.py`); an unsharded store has the same
        hash."""
        self.flush()

        def read(name: str, begin: int, end: int) -> np.ndarray:
            return self.read(name, VALUES if name in self.masks else MASTER, begin, end)

        return hash_read(self.shapes, read, self.mask)

    def _spans(self, name: str, role: str, begin: int, end: int) -> Iterator[HeldRange]:
        group = self._role(role).group
        if name in self.masks and role != MASTER:
            return self.masks.spans(name, group, begin, end)
        return self.shard_map.spans(name, begin, end, group)

    def _role(self, name: str) -> Role:
        return self._roles.get(name, Role(MASTER))


class Assembly:
    """Memory in which weights are assembled: two buffers, so that the previous result stays
    valid."""

    def __init__(self, size: int) -> None:
        self._slabs = [allocate(size // 2), allocate(size // 2)]

    @classmethod
    def needed(cls, program: Holding, shard_map: ShardMap) -> int:
        """Return the bytes of the largest stage."""
        cut = {name for name, pieces in shard_map.pieces.items() if len(pieces) > 1}
        _, largest = largest_stage(
            program, lambda weight: _aligned(_value_bytes(weight)) if weight.name in cut else 0
        )
        return 2 * largest

    @property
    def bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def page_lock(self) -> bool:
        """Page-lock the memory; return whether the system allowed it."""
        return all(page_lock(slab) for slab in self._slabs)

    def places(self, sizes: Sequence[int]) -> Iterator[np.ndarray]:
        """Return arrays of so many bytes; they are valid until the second call after this one."""
        need = sum(map(_aligned, sizes))
        slab = self._slabs.pop(0)
        if slab.nbytes < need:  # for a program whose stages are larger
            slab = allocate(need)
        self._slabs.append(slab)
        begins = np.cumsum([0, *map(_aligned, sizes)])
        return iter([slab[b : b + n] for b, n in zip(begins[:-1], sizes, strict=True)])


def _value_bytes(weight: WeightSpec) -> int:
    return weight.entries * weight.stream_dtype.itemsize  # masks have memory of their own


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _sum_of(traffic: Iterable[FlashTraffic]) -> FlashTraffic:
    each = list(traffic)
    return FlashTraffic(
        sum(one.read_bytes for one in each),
        sum(one.written_bytes for one in each),
        sum(one.waited_seconds for one in each),
        sum(one.speculated_bytes for one in each),
        sum(one.discarded_bytes for one in each),
    )
