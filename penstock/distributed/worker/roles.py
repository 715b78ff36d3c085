"""The roles of a worker process, engine or shard of the store, and their construction.

An engine computes on the device that the run has chosen. A shard needs no device and is built from
a program for the CPU: the stages, their weights and the transfer chunks are the same for all
devices.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import size_above
from penstock.distributed.control_messages import Opens, ReplicaSlot
from penstock.distributed.protocol import (
    EngineNode,
    NodeContext,
    RelayNode,
    ShardNode,
    TransferSchedule,
)
from penstock.distributed.rpc import OwnedShard
from penstock.distributed.run_spec import engine_digest, shard_digest, transfers_by_step
from penstock.distributed.worker.engine_executor import LocalEngineExecutor
from penstock.distributed.worker.shard_executor import LocalShardExecutor
from penstock.errors import ClusterError, UnfitHostError
from penstock.program import Program
from penstock.step_schedule import ByStep, StepSchedule
from penstock.telemetry import process_memory

if TYPE_CHECKING:
    from penstock.compiler import Products
    from penstock.config import Config
    from penstock.models import ModelSource

_SHOWN_FIELDS = 3


class EngineRole:
    """The engine role."""

    def __init__(self, work: LocalEngineExecutor, transfers: ByStep[TransferSchedule]) -> None:
        self.work, self.transfers = work, transfers
        self._computed_before = work.computed  # by the nodes before the present one

    def node(self, number: int, context: NodeContext) -> EngineNode:
        """Return a node of the engine; after a lost connection the engine joins as another node."""
        self._computed_before = self.work.computed
        return EngineNode(number, context, self.transfers, self.work)

    def metrics(self) -> Mapping[str, Any]:
        """Return the engine's memory, and the computing time of its node."""
        computed = zip(self.work.computed, self._computed_before, strict=True)
        return {
            "peak_bytes": self.work.peak_bytes,
            "computed": [now - before for now, before in computed],
        }


class ShardRole:
    """The role of a shard of the store: keeps weights and optimizer state."""

    def __init__(
        self,
        shard: int,
        storage: OwnedShard,
        work: LocalShardExecutor,
        transfers: ByStep[TransferSchedule],
    ) -> None:
        self.storage, self.transfers = storage, transfers
        self._shard, self._work = shard, work

    def node(self, number: int, context: NodeContext) -> ShardNode:
        """Return the shard's node."""
        return ShardNode(number, self._shard, context, self.transfers, self._work)

    def metrics(self) -> Mapping[str, Any]:
        """Return no metrics: the run requests a shard's figures by RPC."""
        return {}


class RelayRole:
    """The role of a relay: forwards weights and adds gradients."""

    def __init__(self, transfers: ByStep[TransferSchedule]) -> None:
        self.transfers = transfers

    def node(self, number: int, context: NodeContext) -> RelayNode:
        """Return the relay's node."""
        return RelayNode(number, context, self.transfers)

    def metrics(self) -> Mapping[str, Any]:
        """Return no metrics: a relay computes nothing."""
        return {}


@dataclass(frozen=True)
class BuiltRole:
    """A role that was built for a run, and the specification that all processes must share."""

    spec: Mapping[str, Any]
    role: EngineRole | ShardRole | RelayRole
    digest: str


@dataclass(frozen=True)
class _Compiled:
    config: Config
    model: ModelSource
    program: Program
    recompute: frozenset[int]
    schedules: ByStep[StepSchedule]
    transfers: ByStep[TransferSchedule]


def _compile(spec: Mapping[str, Any], device: str, products: Products) -> _Compiled:
    """Compile the run's model for one kind of device, as the run specification says."""
    from penstock.config import Config
    from penstock.engine import set_threads
    from penstock.planning import builders, mask_rule_of, model_sources

    config = Config.from_mapping(spec["config"])
    set_threads(spec["threads"])
    assert config.model is not None
    kept = None if spec["kept"] is None else Path(spec["kept"])
    source = model_sources.model_source(config.model, kept).with_buffer_seed(spec["buffer_seed"])
    program = builders.compile_source(
        model_sources.with_adapters(source, config.lora),
        micro_batch=spec["micro_batch"],
        length=spec["length"],
        precision=config.precision,
        device=device,
        products=products,
        train=config.train,
        freeze=config.freeze,
        bfloat16=spec["bfloat16"],
        sparse=spec["sparse"],
        slot_bytes=spec["slot_bytes"],
    )
    recompute = frozenset(spec["recompute"])
    shards = int(spec["shards"])
    rule = mask_rule_of(config, program)
    schedules = StepSchedule.by_step(program, recompute, rule.policy if rule else None)
    transfers = transfers_by_step(program, schedules, shards)
    return _Compiled(config, source, program, recompute, schedules, transfers)


def build_engine(spec: Mapping[str, Any]) -> BuiltRole:
    """Build an engine from the run specification.

    Raises:
        UnfitHostError: this host lacks the device or the memory.
        ClusterError: this process has read another model than the trainer.
        PenstockError: no host could run such an engine.
    """
    from penstock.engine import (
        EnginePlan,
        SparseProducts,
        SparseWeights,
        return_free_pages,
        target_of,
    )
    from penstock.planning import keep_pages

    device = str(spec["device"])
    _require_device(device)
    products = _required_products(spec, device)
    compiled = _compile(spec, device, products)
    model = _require_same_model(spec, compiled.model)
    if compiled.config.cluster.has_other_hosts:  # the trainer has counted workers of its own host
        _require_memory(spec, device)
    record = spec["sparse_products"]
    sparse = None if record is None else SparseWeights(SparseProducts.from_record(record))
    engine = target_of(device).make_engine(
        compiled.program,
        EnginePlan(compiled.recompute, cuda_graphs=compiled.config.engine.cuda_graphs),
        budget_bytes=spec["engine_bytes"],
        sparse=sparse,
    )
    if not target_of(device).has_own_memory:
        return_free_pages()  # which would be counted as memory of libraries
        keep_pages(process_memory.resident_bytes() + spec["engine_most"])
    work = LocalEngineExecutor(engine, compiled.program, compiled.schedules, device)
    digest = engine_digest(compiled.program, compiled.transfers, device, products, record, model)
    return BuiltRole(dict(spec), EngineRole(work, compiled.transfers), digest)


def build_shard(spec: Mapping[str, Any], slot: ReplicaSlot, opens: Opens) -> BuiltRole:
    """Build a shard of the store, on any host: a shard does no arithmetic of an engine.

    Args:
        opens: how the shard opens its store (`Assignment`).

    Raises:
        PenstockError: this machine cannot hold the shard.
    """
    compiled, shard = _compile(spec, "cpu", "torch"), slot.shard
    owned = OwnedShard(compiled.config, compiled.program, shard, spec["store_bytes"], slot.replica)
    if opens == "what was left":
        owned.open(must_hold=True)
    elif opens == "empty":
        owned.open_empty()
    has_replica = compiled.config.store.replicas > 1
    work = LocalShardExecutor(owned, shard, compiled.schedules, has_replica)
    digest = shard_digest(compiled.program, compiled.transfers)
    return BuiltRole(dict(spec), ShardRole(shard, owned, work, compiled.transfers), digest)


def build_relay(spec: Mapping[str, Any]) -> BuiltRole:
    """Build a relay, on any host: it needs the transfers of a step, and no device.

    Raises:
        PenstockError: the program cannot be compiled here.
    """
    compiled = _compile(spec, "cpu", "torch")
    digest = shard_digest(compiled.program, compiled.transfers)
    return BuiltRole(dict(spec), RelayRole(compiled.transfers), digest)


def _require_device(device: str) -> None:
    from penstock.engine import target_of

    if not target_of(device).is_available:
        raise UnfitHostError(
            f"the run's engines compute on GPUs, and PyTorch finds no GPU on "
            f"{socket.gethostname()}; start engines on hosts with a GPU, or the run with "
            "engine.device: cpu"
        )


def _required_products(spec: Mapping[str, Any], device: str) -> Products:
    """Return the run's library of matrix products: another library rounds differently."""
    from penstock.engine import target_of

    for products in target_of(device).products:
        if products == spec["products"] and target_of(device).can_multiply_with(products):
            return products
    raise UnfitHostError(
        f"the run's engines multiply float32 matrices by {spec['products']}, which PyTorch lacks "
        f"on {socket.gethostname()}; install the PyTorch version of the trainer's host there"
    )


def _require_same_model(spec: Mapping[str, Any], source: ModelSource) -> dict[str, str] | None:
    """Return `ModelSource.fields`, which are those of the trainer."""
    expected, found = spec["model"], source.fields()
    if found == expected:
        return found
    here, there = found or {}, expected or {}
    names = sorted(n for n in here.keys() | there.keys() if here.get(n) != there.get(n))
    shown = [
        f"{name}: expected {there.get(name, 'no such field')}, found "
        f"{here.get(name, 'no such field')}"
        for name in names[:_SHOWN_FIELDS]
    ]
    if len(names) > _SHOWN_FIELDS:
        shown.append(f"{len(names) - _SHOWN_FIELDS} more")
    place = "" if source.folder is None else f" from {source.folder}"
    raise ClusterError(
        f"{socket.gethostname()} has read another model{place} than the trainer ("
        f"{'; '.join(shown)}); copy the model's files from the trainer's host and install the same "
        "versions of Penstock and transformers; if the files were changed after the run had "
        "started, start the run again"
    )


def _require_memory(spec: Mapping[str, Any], device: str) -> None:
    """Refuse an engine that would exhaust memory in the middle of a step.

    Free memory may be even less by then.
    """
    from penstock.planning import Machine

    machine = Machine.here((device,))
    free = {"memory": (machine.available_bytes, int(spec["engine_host"]))}
    if device in machine.devices:
        free["GPU memory"] = machine.devices[device].free, int(spec["engine_peak"])
    for what, (has, needs) in free.items():
        if has < needs:
            raise UnfitHostError(
                f"an engine of this run needs {size_above(needs)} of {what}, "
                f"{socket.gethostname()} has {size_above(has)} free; start it on a larger host, or "
                "the run with a lower engine.memory, batch.micro or data.sequence_length, or with "
                "more engines"
            )
