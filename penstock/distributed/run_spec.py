"""The specification that all processes of a run must agree on: settings, transfers, digests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from penstock.config import Config
from penstock.distributed.protocol import (
    GRADIENT_WIDTH,
    Chunk,
    TransferOperation,
    TransferSchedule,
    chunks,
    sparse_chunks,
)
from penstock.engine import thread_count
from penstock.models import KEPT
from penstock.planning import ExecutionPlan
from penstock.program import Program, WeightSpec
from penstock.step_schedule import ByStep, Operation, StepSchedule
from penstock.store import Holding, ShardMap

if TYPE_CHECKING:
    from penstock.models import ModelSource

Placement = Mapping[str, Sequence[tuple[int, int, int]]]
"""The shards that hold each weight: shard, first element, last element + 1, in order."""


@dataclass(frozen=True)
class RunSpec:
    """The values on which the processes of a run must agree, and the terms that each receives.

    `engine_digest` covers everything that engines must have in common; `shard_digest` covers the
    part that shards must share with engines. `parts` are the holdings of each shard, `first_nodes`
    the numbers of its first nodes. `has_shard_processes`: whether shards are separate processes.
    """

    transfers: ByStep[TransferSchedule]
    engine_digest: str
    shard_digest: str
    terms: Mapping[str, Any]
    parts: Sequence[Holding]
    first_nodes: Sequence[Sequence[int]]
    has_shard_processes: bool

    @classmethod
    def of(cls, config: Config, layout: ExecutionPlan, model: ModelSource) -> RunSpec:
        """Return the specification of a run of `model`, as this process has read it."""
        program, schedules = layout.program, layout.schedule_of
        shards, replicas = config.store.shards, config.store.replicas
        transfers = transfers_by_step(program, schedules, shards)
        return cls(
            transfers,
            engine_digest(
                program,
                transfers,
                layout.device,
                layout.products,
                sparse_record(layout),
                model.fields(),
            ),
            shard_digest(program, transfers),
            terms_of(config, layout, model),
            list(ShardMap.of(program, shards).parts(program)),
            [[1 + shard + r * shards for r in range(replicas)] for shard in range(shards)],
            config.cluster.shards == "apart",
        )


def transfers_by_step(
    program: Program, schedules: ByStep[StepSchedule], shards: int
) -> ByStep[TransferSchedule]:
    """Return the transfers of each step of a run."""
    placement = placement_of(program, shards)
    return schedules.map(lambda schedule: transfers_of(program, schedule, placement, shards))


def transfers_of(
    program: Program, schedule: StepSchedule, placement: Placement, shards: int
) -> TransferSchedule:
    """Return the transfers of a schedule's operations.

    Args:
        placement: the shards that hold each weight.
    """
    return TransferSchedule(
        tuple(
            TransferOperation(
                operation.number,
                operation.stage,
                operation.sweep,
                _weight_chunks(program, operation, placement),
                _gradient_chunks(program, operation, placement),
            )
            for operation in schedule.operations
        ),
        shards,
    )


def placement_of(program: Program, shards: int) -> Placement:
    """Return the distribution of weights over shards: a deterministic function of its arguments."""
    return {
        name: [(piece.shard, piece.begin, piece.end) for piece in pieces]
        for name, pieces in ShardMap.of(program, shards).pieces.items()
    }


def _weight_chunks(
    program: Program, operation: Operation, placement: Placement
) -> tuple[Chunk, ...]:
    found: list[Chunk] = []
    for tensor, name in enumerate(operation.weights):
        spec = program.weights[name]
        for shard, begin, end in placement[name]:
            piece = Chunk(shard, tensor, begin, end, spec.format.stream.width)
            found.extend(_chunks(spec, piece, spec.is_sparse))
    return tuple(found)


def _gradient_chunks(
    program: Program, operation: Operation, placement: Placement
) -> tuple[Chunk, ...]:
    """Return the chunks of an operation's gradients; those of a dense gradient are dense."""
    found: list[Chunk] = []
    for tensor, name in enumerate(operation.gradients):
        spec = program.weights[name]
        is_packed = spec.is_sparse and name not in operation.dense_gradients
        for shard, begin, end in placement[name]:
            found.extend(_chunks(spec, Chunk(shard, tensor, begin, end, GRADIENT_WIDTH), is_packed))
    return tuple(found)


def _chunks(spec: WeightSpec, piece: Chunk, is_packed: bool) -> Sequence[Chunk]:
    if is_packed:
        return sparse_chunks(piece, spec.capacity / spec.elements)
    return chunks([piece])


def shard_digest(program: Program, transfers: ByStep[TransferSchedule]) -> str:
    """Return the digest of stages, weights and chunks, which shards and engines share."""
    state = xxhash.xxh3_128()
    for stage in program.stages:
        state.update(repr((stage.name, stage.weights)).encode())
    for name, spec in program.weights.items():
        state.update(repr((name, spec.shape, spec.format.name, spec.trainable)).encode())
    state.update(repr(transfers.usual).encode())
    if transfers.dense is not transfers.usual:
        state.update(repr(transfers.dense).encode())
    return state.hexdigest()


def engine_digest(
    program: Program,
    transfers: ByStep[TransferSchedule],
    device: str,
    products: str,
    sparse: Sequence[Mapping[str, Any]] | None = None,
    model: Mapping[str, str] | None = None,
) -> str:
    """Return the digest that engines share: `shard_digest`, the stages' operations, products.

    **Arguments:** `sparse` are the choices of the products of sparse weights, if there are any.
    `model` is what decides the values of the model's buffers, if it has a configuration
    (`ModelSource.fields`): operations do not contain these values.
    """
    state = xxhash.xxh3_128(shard_digest(program, transfers).encode())
    computed = [(stage.kind.digest, stage.first_dropout) for stage in program.stages]
    state.update(repr((device, products, computed)).encode())
    if sparse is not None:
        state.update(json.dumps(sparse, sort_keys=True).encode())
    if model is not None:
        state.update(json.dumps(model, sort_keys=True).encode())
    return state.hexdigest()


def sparse_record(layout: ExecutionPlan) -> list[dict[str, Any]] | None:
    """Return the choices of the products of a run's sparse weights; None if it has none."""
    shared = layout.sparse_weights
    return None if shared is None else shared.products.as_record()


def terms_of(config: Config, layout: ExecutionPlan, model: ModelSource) -> dict[str, Any]:
    """Return the terms as plain data, from which `main.py` builds an engine or a shard."""
    return {
        "config": config.to_mapping(),
        "micro_batch": layout.micro_batch,
        "length": layout.sequence_length,
        "slot_bytes": layout.slot_bytes,
        "bfloat16": sorted(layout.program.bfloat16),
        "device": layout.device,  # chosen once: different devices round differently
        "products": layout.products,
        "recompute": sorted(layout.plan.recompute),
        "shards": config.store.shards,
        "engine_bytes": layout.budget_bytes,
        "engine_peak": layout.shares.engine_peak,
        "engine_host": layout.shares.engine_host,
        "engine_most": layout.shares.engine_most,
        "store_bytes": layout.shares.store,
        "kept": _kept_files(config, model),
        "model": model.fields(),
        "buffer_seed": model.buffer_seed,
        "sparse": dict(layout.program.capacities),
        "sparse_products": sparse_record(layout),
        # Equal on all hosts: PyTorch splits sums over rows by its number of threads.
        "threads": thread_count(config.engine.threads),
    }


_TYPES: dict[str, tuple[type, ...]] = {
    "config": (dict,),
    "micro_batch": (int,),
    "length": (int,),
    "slot_bytes": (int, type(None)),
    "bfloat16": (list,),
    "device": (str,),
    "products": (str,),
    "recompute": (list,),
    "shards": (int,),
    "engine_bytes": (int,),
    "engine_peak": (int,),
    "engine_host": (int,),
    "engine_most": (int,),
    "store_bytes": (int,),
    "kept": (str, type(None)),
    "model": (dict, type(None)),
    "buffer_seed": (int,),
    "sparse": (dict,),
    "sparse_products": (list, type(None)),
    "threads": (int,),
}


def are_terms(value: object) -> bool:
    """Tell whether received plain data has the form of `terms_of`."""
    return isinstance(value, dict) and all(
        isinstance(value.get(key, ...), types) for key, types in _TYPES.items()
    )


def _kept_files(config: Config, model: ModelSource) -> str | None:
    """Return the run's copy of files of `model.hf`, if this process has read the model from it.

    A copy that an interrupted start has left may be of another model, and is replaced while workers
    read.
    """
    kept = config.run.dir / KEPT
    return str(kept.absolute()) if model.folder == kept else None
