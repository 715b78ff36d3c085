"""Assembly of a run: model, data, devices and execution plan, then the step runner.

A `RunSetup` is complete before a store or another process is opened, so a mistake in a
configuration is reported before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from penstock.config import Config, check_same_sparsity
from penstock.data import Source
from penstock.engine import choose_target, target_of
from penstock.errors import ConfigError
from penstock.models import ModelSource
from penstock.planning import (
    ExecutionPlan,
    model_sources,
    plan_execution,
    sequence_length,
    wafer_options,
    with_products,
    with_wafer,
)
from penstock.step import (
    Batches,
    LocalEngines,
    StepRunner,
    choose_devices,
    counted,
    make_local_engines,
)
from penstock.store import ShardedStore, Store
from penstock.telemetry import ClusterEvent
from penstock.training.checkpoint_backends import CheckpointBackend
from penstock.training.data_loading import TrainingData, open_data
from penstock.training.early_stop import require_held_out
from penstock.training.run_start import rows_per_step

if TYPE_CHECKING:
    from penstock.distributed.control import ClusterManager
    from penstock.step import DistributedStepRunner


@dataclass(frozen=True)
class RunSetup:
    """The parts of a run that are decided before anything is opened.

    Attributes:
        devices: of a group of GPUs, one engine each; empty if engines take turns on `device`.
        device: the name of the target that the program was compiled for.
    """

    model: ModelSource
    data: TrainingData
    devices: Sequence[str]
    device: str
    plan: ExecutionPlan

    @property
    def device_names(self) -> str:
        """The devices, for display."""
        wafer = self.plan.plan.wafer
        if wafer is not None:
            how = wafer.options.cycles.replace("_", " ")
            return f"a wafer of {wafer.options.mesh} cores ({wafer.options.core.name}, {how})"
        return ", ".join(self.devices) or self.device


def set_up(
    config: Config,
    model: nn.Module | ModelSource | None,
    source: Source | None,
    held_out: Source | None,
    checkpoints: CheckpointBackend,
    notice: Callable[[str], None],
    *,
    trains: bool,
) -> RunSetup:
    """Return the setup of a run.

    Args:
        model: replaces `config.model`.
        source: batches that replace those of `config.data`.
        held_out: the same, for evaluations.
        checkpoints: of the run, which may be resumed.
        notice: called with sentences for the user.
        trains: whether it needs the whole data set.

    Raises:
        ConfigError, DataError, CompileError, BudgetError: as in `Trainer`.
    """
    recorded = checkpoints.recorded
    is_resumed, needs_base = recorded is not None, checkpoints.needs_base
    seed = recorded.buffer_seed if recorded else None
    found = model_sources.source_of(config, model, is_resumed, notice, needs_base, seed)
    devices = choose_devices(config.engine)
    target = target_of(devices[0]) if devices else choose_target(config.engine.device)
    wafer = wafer_options(config, target.name)
    if recorded is not None:
        check_same_sparsity(config, recorded.trajectory)

    def planned(length: int, notice: Callable[[str], None]) -> ExecutionPlan:
        plan = plan_execution(
            counted(config, devices),
            found,
            target.name,
            length,
            recorded.micro_batch if recorded else None,
            recorded.slot_bytes if recorded else None,
            devices,
            notice,
            checkpoints.bfloat16,
            recorded_products=recorded.products if recorded else None,
            recorded_entries=recorded.sparse_entries if recorded else None,
        )
        return with_wafer(plan, wafer)

    def check(length: int) -> None:
        """Refuse what cannot be executed before a data set is built, which can take hours."""
        if recorded is None and config.data.validation == 0:
            require_held_out(config, None)
        planned(length, lambda text: None)

    if source is None:
        data = open_data(config, found, notice, recorded, check, trains=trains)
    else:
        data = TrainingData(source, held_out, None, sequence_length(config, found))
    if recorded is None:
        require_held_out(config, data.held_out)
    plan = planned(data.sequence_length, notice)
    products = recorded.sparse_products if recorded else None
    plan = with_products(plan, config.run.steps, products, notice)
    return RunSetup(found, data, devices, target.name, plan)


def require_known_elsewhere(has_given_model: bool) -> None:
    """Refuse a module from Python for a run with other processes.

    **Raises:** `ConfigError` if a module is given.
    """
    if has_given_model:
        raise ConfigError(
            "cluster.start: a module that was given from Python is not known to other processes; "
            "name a function that builds it in model.factory"
        )


def start_cluster(
    config: Config,
    setup: RunSetup,
    notify: Callable[[ClusterEvent], None],
    should_stop: Callable[[], bool],
) -> ClusterManager:
    """Listen for the run's other processes, and start those that the run starts itself."""
    from penstock.distributed.control import open_cluster

    return open_cluster(config, setup.plan, setup.model, tell=notify, should_stop=should_stop)


def make_runner(
    config: Config, setup: RunSetup, store: Store, manager: ClusterManager | None
) -> tuple[StepRunner | DistributedStepRunner, LocalEngines | None]:
    """Return the step runner of a run, and the engines of this process if there are any.

    Args:
        manager: of the run's other processes; None if all engines are in this process.
    """
    plan, model = setup.plan, setup.model
    batches = Batches(model, setup.data.training, config.batch.size, plan.micro_batch)
    tokens = rows_per_step(config, model, plan)
    if manager is None:
        here = make_local_engines(config, plan, setup.devices, setup.device)
        runner = StepRunner(
            plan, store, here.fabric, here.engines, batches, seed=config.run.seed, tokens=tokens
        )
        return runner, here
    from penstock.step import DistributedStepRunner

    if config.cluster.shards == "here":
        manager.add_local_shards(store.shards if isinstance(store, ShardedStore) else [store])
    return DistributedStepRunner(config, plan, store, batches, manager, tokens=tokens), None
