"""The store operations of a shard node: reading weights, adding gradients, committing.

The store may be in the trainer's process or in a process of its own. The location decides only the
steps to which the store can roll back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock.distributed.protocol import SparseChunk, TransferOperation
from penstock.distributed.rpc import (
    ShardStorage,
    body_of_report,
    bytes_of_histograms,
    decision_of,
    masks_of_payload,
    open_selections_of,
)
from penstock.distributed.worker.sparse_transfer import entries_in, packed_chunk
from penstock.errors import ClusterError, ProtocolError
from penstock.program import WeightSpec
from penstock.spans import Spans
from penstock.sparsity import SparseWeight
from penstock.step_schedule import ByStep, StepSchedule
from penstock.store import (
    HeldSparseShard,
    ReplicatedStore,
    Store,
    kept_entries,
    sparse_shard,
    trainable_weights,
)


class LocalShardExecutor:
    """Streams a store's weights, adds gradients to the store, and commits its steps.

    Args:
        has_replica: whether another node should hold the same state, which every step compares.
    """

    def __init__(
        self,
        storage: ShardStorage,
        shard: int,
        schedules: ByStep[StepSchedule],
        has_replica: bool = False,
    ) -> None:
        self._schedules, self._schedule = schedules, schedules.usual  # and that of the step
        self._storage, self._shard, self._has_replica = storage, shard, has_replica
        self._sent_masks: dict[str, int] = {}  # versions that the engines of this epoch have

    @property
    def _store(self) -> Store:
        return self._storage.store

    @property
    def spans(self) -> Sequence[Spans]:
        """The measurements of the store."""
        return self._storage.spans

    def held_steps(self) -> Sequence[int]:
        """Return the steps to which the store can roll back."""
        return self._storage.held_steps()

    def roll_back(self, step: int) -> None:
        """Roll the store back to one of the held steps."""
        self._storage.roll_back(step)

    def enter(self) -> None:
        """Send every mask again: engines of a new epoch may have none."""
        self._sent_masks.clear()

    def begin(self, step: int) -> None:
        """Discard the results of a step that was not committed."""
        if self._store.step != step - 1:
            raise ClusterError(
                f"shard {self._shard}: step {step} expects the state of step {step - 1}, the "
                f"store has step {self._store.step}"
            )
        self._schedule = self._schedules(step)
        self._store.discard()

    def settle(self) -> None:
        """Apply the updates of the previous step, which no fetch will request."""
        self._store.flush()

    def fetch(self, operation: TransferOperation) -> Sequence[np.ndarray]:
        """Return the bytes of every chunk of this shard."""
        names, held = self._schedule.operations[operation.number].weights, self._store.program
        held_names = held.stages[operation.stage].weights
        wanted = [name for name in names if name in held_names]
        views = self._store.fetch(operation.stage, [held_names.index(name) for name in wanted])
        streamed = dict(zip(wanted, views, strict=True))
        flat = {
            name: view.view(-1).view(torch.uint8).numpy()
            for name, view in streamed.items()
            if isinstance(view, torch.Tensor)
        }
        sparse = {name: view for name, view in streamed.items() if isinstance(view, SparseWeight)}
        lacking = {n for n, view in sparse.items() if self._sent_masks.get(n) != view.version}
        parts = []
        for number in operation.of_shard(self._shard):
            piece = operation.weights[number]
            name = names[piece.tensor]
            if isinstance(piece, SparseChunk):
                parts.append(packed_chunk(sparse[name], piece, name in lacking))
                continue
            first = held.weights[name].begin
            parts.append(
                flat[name][(piece.begin - first) * piece.width : (piece.end - first) * piece.width]
            )
        self._sent_masks.update((name, sparse[name].version) for name in lacking)
        return parts

    def receive(
        self, operation: TransferOperation, gradients: Mapping[int, np.ndarray | None]
    ) -> None:
        """Add this shard's gradients of an operation."""
        trained = self._schedule.operations[operation.number].gradients
        held = self._store.program
        held_names = trainable_weights(held, held.stages[operation.stage])
        tensors: dict[str, torch.Tensor] = {}
        for number, gradient in gradients.items():
            piece = operation.gradients[number]
            if gradient is None:
                continue
            spec = held.weights[trained[piece.tensor]]
            if spec.is_sparse:
                self._require_due(spec.name, is_dense=not isinstance(piece, SparseChunk))
            if isinstance(piece, SparseChunk):
                self._put_entries(tensors, spec, piece, gradient)
                continue
            if spec.name not in tensors:
                tensors[spec.name] = torch.empty(spec.shape)
            begin, end = piece.begin - spec.begin, piece.end - spec.begin
            tensors[spec.name].view(-1)[begin:end] = torch.from_numpy(gradient)
        self._store.receive(operation.stage, [tensors.get(name) for name in held_names])

    def _put_entries(
        self,
        tensors: dict[str, torch.Tensor],
        spec: WeightSpec,
        chunk: SparseChunk,
        gradient: np.ndarray,
    ) -> None:
        """Put a chunk of a sparse weight's gradient into its place."""
        index = self._sparse_store.mask(spec.name)
        assert index is not None
        place = entries_in(index, chunk)
        count = place.stop - place.start
        if gradient.size != max(1, count):
            raise ProtocolError(
                f"gradient of {spec.name}: expected {count} numbers for elements {chunk.begin} to "
                f"{chunk.end}, got {gradient.size}; do all nodes have the same masks?"
            )
        if spec.name not in tensors:
            tensors[spec.name] = torch.empty(index.kept)
        tensors[spec.name][place] = torch.from_numpy(gradient[:count])

    def _require_due(self, name: str, is_dense: bool) -> None:
        """Check that the store expects the kind of gradient that the step's schedule names."""
        store, kinds = self._sparse_store, ("the gradient of its entries", "the dense gradient")
        expected = store.needs_dense_gradient(name)
        if expected != is_dense:
            raise ProtocolError(
                f"{name}: step {store.step + 1} expects {kinds[expected]}, got {kinds[is_dense]}; "
                "do all nodes have the same settings of sparsity?"
            )

    @property
    def _sparse_store(self) -> HeldSparseShard:
        return sparse_shard(self._store)

    def prepare(self) -> Mapping[str, Any]:
        """Report the shard's gradients and the state that the shard holds."""
        report = body_of_report(self._store.prepare())
        # In the order of the program and without names, which every node knows.
        kept = kept_entries(self._store)
        report["kept"] = [kept[name] for name in self._store.program.weights if name in kept]
        if isinstance(self._store, ReplicatedStore) and self._has_replica:
            report["held"] = [list(each) for each in self._store.compared()]
        return report

    def histograms(self, selections: np.ndarray | None) -> np.ndarray:
        """Return the histograms of the shard's entries for selections of the step, bytes."""
        found = self._sparse_store.histograms(open_selections_of(selections))
        return bytes_of_histograms(found)

    def commit(
        self, step: int, decision: Mapping[str, Any], masks: np.ndarray | None = None
    ) -> Mapping[str, Any]:
        """Commit the step by the decision that was made for all shards."""
        changes, replaces_update = masks_of_payload(masks)
        decided = replace(decision_of(decision), masks=changes, replaces_update=replaces_update)
        if decided.step != step:
            raise ProtocolError(
                f"shard {self._shard}: expected a decision for step {step}, got one for step "
                f"{decided.step}; do all nodes run the same version of Penstock?"
            )
        self._store.decide(decided)
        return {"step": step}
