"""What a process of a run may be, an engine or a shard of the store, and how it is made so.

An engine computes on the device that the run has chosen; a shard needs none, and is made of a
program for the CPU: which stages there are, their weights and the chunks that these travel in are
the same for all devices.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import size_above
from penstock.distributed.control_messages import Opens, ReplicaSlot
from penstock.distributed.protocol import EngineNode, NodeContext, ShardNode, TransferSchedule
from penstock.distributed.run_spec import engine_digest, placement_of, shard_digest, transfers_of
from penstock.distributed.worker.engine_executor import LocalEngineExecutor
from penstock.distributed.worker.shard_executor import LocalShardExecutor
from penstock.distributed.worker.shard_storage import OwnedShard
from penstock.errors import UnfitHostError
from penstock.program import Program
from penstock.step_schedule import StepSchedule

if TYPE_CHECKING:
    from penstock.compiler import Products
    from penstock.config import Config


class EngineRole:
    """An engine: it computes."""

    def __init__(self, work: LocalEngineExecutor, transfers: TransferSchedule) -> None:
        self.work, self.transfers = work, transfers

    def node(self, number: int, runtime: NodeContext) -> EngineNode:
        """Return the engine's node."""
        return EngineNode(number, runtime, self.transfers, self.work)

    def figures(self) -> Mapping[str, Any]:
        """Return its memory, and how long it has computed."""
        return {"peak_bytes": self.work.peak_bytes, "computed": list(self.work.computed)}


class ShardRole:
    """A shard of the store: it keeps weights and state."""

    def __init__(
        self, shard: int, place: OwnedShard, work: LocalShardExecutor, transfers: TransferSchedule
    ) -> None:
        self.place, self.transfers = place, transfers
        self._shard, self._work = shard, work

    def node(self, number: int, runtime: NodeContext) -> ShardNode:
        """Return the shard's node."""
        return ShardNode(number, self._shard, runtime, self.transfers, self._work)

    def figures(self) -> Mapping[str, Any]:
        """Return nothing more: what it has is asked for."""
        return {}


@dataclass(frozen=True)
class BuiltRole:
    """What was made for a run: its role, and what that takes to be the same for all."""

    told: Mapping[str, Any]
    role: EngineRole | ShardRole
    digest: str


@dataclass(frozen=True)
class _Compiled:
    config: Config
    program: Program
    recompute: frozenset[int]
    schedule: StepSchedule
    transfers: TransferSchedule


def _compile(told: Mapping[str, Any], device: str, products: Products) -> _Compiled:
    """Compile the run's model, as the coordinator's process said, for one kind of device."""
    from penstock.config import Config
    from penstock.engine import set_threads
    from penstock.planning import builders

    config = Config.from_mapping(told["config"])
    set_threads(told["threads"])
    assert config.model is not None
    kept = None if told["kept"] is None else Path(told["kept"])
    source = builders.model_source(config.model, kept)
    program = builders.compile_source(
        builders.with_adapters(source, config.lora),
        micro_batch=told["micro_batch"],
        length=told["length"],
        precision=config.precision,
        device=device,
        products=products,
        train=config.train,
        freeze=config.freeze,
        bfloat16=told["bfloat16"],
        slot_bytes=told["slot_bytes"],
    )
    recompute = frozenset(told["recompute"])
    shards = int(told["shards"])
    schedule = StepSchedule.of(program, recompute)
    transfers = transfers_of(program, schedule, placement_of(program, shards), shards)
    return _Compiled(config, program, recompute, schedule, transfers)


def build_engine(told: Mapping[str, Any]) -> BuiltRole:
    """Make an engine, as the coordinator's process said.

    Raises:
        UnfitHostError: this host has not got the device, or the memory.
        PenstockError: no host could be such an engine.
    """
    from penstock.engine import EnginePlan, target_of

    device = str(told["device"])
    _require_device(device)
    products = _required_products(told, device)
    made = _compile(told, device, products)
    if made.config.cluster.has_other_hosts:  # on its own host the run has counted them
        _require_memory(told, device)
    engine = target_of(device).make_engine(
        made.program, EnginePlan(made.recompute), budget_bytes=told["engine_bytes"]
    )
    work = LocalEngineExecutor(engine, made.program, made.schedule, device)
    digest = engine_digest(made.program, made.transfers, device, products)
    return BuiltRole(dict(told), EngineRole(work, made.transfers), digest)


def build_shard(told: Mapping[str, Any], place: ReplicaSlot, opens: Opens) -> BuiltRole:
    """Make a shard of the store, on any host: it moves numbers, and computes with none of them
    what an engine does.

    Args:
        opens: what it does with its store now (`Welcome`).

    Raises:
        PenstockError: this machine cannot be such a shard.
    """
    made, shard = _compile(told, "cpu", "torch"), place.shard
    apart = OwnedShard(made.config, made.program, shard, told["store_bytes"], place.replica)
    if opens == "what was left":
        apart.open(must_hold=True)
    elif opens == "empty":
        apart.open_empty()
    has_replica = made.config.store.replicas > 1
    work = LocalShardExecutor(apart, shard, made.schedule, has_replica)
    digest = shard_digest(made.program, made.transfers)
    return BuiltRole(dict(told), ShardRole(shard, apart, work, made.transfers), digest)


def _require_device(device: str) -> None:
    from penstock.engine import target_of

    if not target_of(device).is_available:
        raise UnfitHostError(
            f"the run's engines compute on GPUs, and {socket.gethostname()} has none that PyTorch "
            "finds; start engines on hosts with one, or the run with engine.device: cpu"
        )


def _required_products(told: Mapping[str, Any], device: str) -> Products:
    """Return who multiplies in the engines of this run: another library would round otherwise."""
    from penstock.engine import target_of

    for products in target_of(device).products:
        if products == told["products"] and target_of(device).can_multiply_with(products):
            return products
    raise UnfitHostError(
        f"the run's engines multiply float32 matrices by {told['products']}, which PyTorch lacks "
        f"on {socket.gethostname()}; install there the PyTorch that the run was started with"
    )


def _require_memory(told: Mapping[str, Any], device: str) -> None:
    """Refuse what would end in the middle of a step. What is free may be less by then."""
    from penstock.planning import Machine

    machine = Machine.here((device,))
    free = {"memory": (machine.available_bytes, int(told["engine_host"]))}
    if device in machine.devices:
        free["GPU memory"] = machine.devices[device].free, int(told["engine_peak"])
    for what, (has, needs) in free.items():
        if has < needs:
            raise UnfitHostError(
                f"an engine of this run needs {size_above(needs)} of {what}, "
                f"{socket.gethostname()} has {size_above(has)} free; start it on a larger host, or "
                "the run with a lower engine.memory, batch.micro or data.sequence_length, or with "
                "more engines"
            )
