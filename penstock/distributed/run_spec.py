"""What all processes of a run are told and must agree on: settings, transfers, digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from penstock.config import Config
from penstock.distributed.protocol import (
    GRADIENT_WIDTH,
    Chunk,
    TransferOperation,
    TransferSchedule,
    chunks,
)
from penstock.engine import thread_count
from penstock.models import KEPT
from penstock.planning import ExecutionPlan
from penstock.program import Program
from penstock.step_schedule import StepSchedule
from penstock.store import Holding, ShardMap

Placement = Mapping[str, Sequence[tuple[int, int, int]]]
"""Which shards hold a weight: shard, and the first and last + 1 of its elements, in order."""


@dataclass(frozen=True)
class RunSpec:
    """What the processes of a run must agree on, and what each is told of it.

    `engine_digest` is of all that engines must have in common, `shard_digest` of what shards must
    share with them. `parts` are what each shard of the store holds, `first_nodes` the numbers of
    its first nodes; `is_apart` says whether these are processes of their own.
    """

    transfers: TransferSchedule
    engine_digest: str
    shard_digest: str
    terms: Mapping[str, Any]
    parts: Sequence[Holding]
    first_nodes: Sequence[Sequence[int]]
    is_apart: bool

    @classmethod
    def of(cls, config: Config, layout: ExecutionPlan) -> RunSpec:
        """Return the plan of a run."""
        program, schedule = layout.program, layout.schedule
        shards, replicas = config.store.shards, config.store.replicas
        transfers = transfers_of(program, schedule, placement_of(program, shards), shards)
        return cls(
            transfers,
            engine_digest(program, transfers, layout.device, layout.products),
            shard_digest(program, transfers),
            terms_of(config, layout),
            list(ShardMap.of(program, shards).parts(program)),
            [[1 + shard + r * shards for r in range(replicas)] for shard in range(shards)],
            config.cluster.shards == "apart",
        )


def transfers_of(
    program: Program, schedule: StepSchedule, placement: Placement, shards: int
) -> TransferSchedule:
    """Return what the operations of a schedule move.

    Args:
        placement: which shard holds what of every weight.
    """
    return TransferSchedule(
        tuple(
            TransferOperation(
                operation.number,
                operation.stage,
                operation.sweep,
                _pieces(program, operation.weights, placement, None),
                _pieces(program, operation.gradients, placement, GRADIENT_WIDTH),
            )
            for operation in schedule.operations
        ),
        shards,
    )


def placement_of(program: Program, shards: int) -> Placement:
    """Return which of so many shards holds what: the same for all who ask."""
    return {
        name: [(piece.shard, piece.begin, piece.end) for piece in pieces]
        for name, pieces in ShardMap.of(program, shards).pieces.items()
    }


def _pieces(
    program: Program, names: Sequence[str], placement: Placement, width: int | None
) -> tuple[Chunk, ...]:
    pieces = [
        Chunk(shard, tensor, begin, end, width or program.weights[name].format.stream.width)
        for tensor, name in enumerate(names)
        for shard, begin, end in placement[name]
    ]
    return chunks(pieces)


def shard_digest(program: Program, transfers: TransferSchedule) -> str:
    """Return what a shard must agree on with engines: stages, weights, chunks; on no device."""
    state = xxhash.xxh3_128()
    for stage in program.stages:
        state.update(repr((stage.name, stage.weights)).encode())
    for name, spec in program.weights.items():
        state.update(repr((name, spec.shape, spec.format.name, spec.trainable)).encode())
    state.update(repr(transfers).encode())
    return state.hexdigest()


def engine_digest(program: Program, transfers: TransferSchedule, device: str, products: str) -> str:
    """Return what two engines must agree on: that, what every stage computes, and by what."""
    state = xxhash.xxh3_128(shard_digest(program, transfers).encode())
    computed = [(stage.kind.digest, stage.first_dropout) for stage in program.stages]
    state.update(repr((device, products, computed)).encode())
    return state.hexdigest()


def terms_of(config: Config, layout: ExecutionPlan) -> dict[str, Any]:
    """Return it as plain data; `main.py` makes an engine or a shard of it."""
    return {
        "config": config.to_mapping(),
        "micro_batch": layout.micro_batch,
        "length": layout.sequence_length,
        "slot_bytes": layout.slot_bytes,
        "bfloat16": sorted(layout.program.bfloat16),
        "device": layout.device,  # chosen once: hosts that differ would round differently
        "products": layout.products,
        "recompute": sorted(layout.plan.recompute),
        "shards": config.store.shards,
        "engine_bytes": layout.budget_bytes,
        "engine_peak": layout.shares.engine_peak,
        "engine_host": layout.shares.engine_host,
        "store_bytes": layout.shares.store,
        "kept": _kept_files(config),
        # The same for all: PyTorch cuts sums over rows by the number of its threads.
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
    "store_bytes": (int,),
    "kept": (str, type(None)),
    "threads": (int,),
}


def are_terms(told: object) -> bool:
    """Tell whether plain data that came from elsewhere is what `terms_of` makes."""
    return isinstance(told, dict) and all(
        isinstance(told.get(key, ...), types) for key, types in _TYPES.items()
    )


def _kept_files(config: Config) -> str | None:
    """Return where the run keeps what it needs of `model.hf`, which may be gone."""
    kept = (config.run.dir / KEPT).absolute()
    return str(kept) if kept.is_dir() else None
