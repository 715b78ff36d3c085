"""From a configuration and a machine to a prediction: the decisions of training, on that machine.

This host is planned as training plans it, from the memory that is free now. Another machine is
planned from its description. Its engines have memory of their own, unless its processor is the
engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.config import Config
from penstock.engine import plan_engine, predict_bytes, target_of
from penstock.errors import ConfigError
from penstock.kernels.processor import Processor
from penstock.machines import GpuCluster, MachineDescription
from penstock.models import ModelSource
from penstock.planning import (
    DeviceMemory,
    Machine,
    OutlinedModels,
    library_bytes,
    model_sources,
    plan_execution,
    selected_weights,
    store_factory,
)
from penstock.prediction.advice import Advice, advise
from penstock.prediction.gpu_run import GpuRun, gpu_run
from penstock.prediction.model_figures import figures_of
from penstock.prediction.planned_disk import full_disk_note, other_disk_note
from penstock.prediction.planned_length import PlannedLength, planned_length
from penstock.prediction.predicted_run import Prediction, predict
from penstock.prediction.shard_hosts import require_room_for_shards
from penstock.program import Program, largest_stage
from penstock.telemetry import process_memory

_DESCRIBED = "described"  # the target of engines that are known by their description alone
_PROCESSOR = Processor("x86_64", "GenuineIntel")  # of a described machine's host


@dataclass(frozen=True)
class ModelMemory:
    """The memory of a model in bytes: its store, an engine with one micro-batch, and the weights of
    its largest stage as they are streamed."""

    parameters: int
    store_bytes: int
    engine_bytes: int
    stage_bytes: int


class Planner:
    """Predicts runs of one model; equal programs are compiled once.

    Args:
        notice: called with sentences for the user, each once.
        remember: whether the memory of libraries is kept for later processes; `library_bytes`.
    """

    def __init__(
        self, notice: Callable[[str], None] = lambda text: None, *, remember: bool = False
    ) -> None:
        self._notice = notice
        self._noticed: set[str] = set()
        self._lengths: dict[tuple[str, int], PlannedLength] = {}  # by data section and model
        self._keeps_libraries = remember
        self._libraries: int | None = None  # resident memory before the first model
        self._recorded_bytes: int | None = None  # after the first that training records too
        self._outlined = OutlinedModels(self._source_of, _compile_source)

    def plan(
        self, config: Config, machine: MachineDescription, *, is_here: bool = False
    ) -> Prediction:
        """Return the prediction of a run on a machine.

        Args:
            config: of the run; `engines` is the number of engines.
            machine: the machine.
            is_here: whether the machine is this host; the memory that is free now then counts.

        Raises:
            BudgetError: the run does not fit; the message has the sum.
            ConfigError: the run cannot be planned on this machine.
        """
        most = machine.engine.most
        if most is not None and config.engines > most:
            raise ConfigError(
                f"engines: {machine.name} has at most {most} engines, got {config.engines}; lower "
                "engines, or choose another machine"
            )
        config = _as_on(machine, config)
        source = self._model(config)
        length = self._length(config, source)
        plan = plan_execution(
            config,
            source,
            "cpu" if machine.engine.is_host else _DESCRIBED,
            length.tokens,
            notice=self._notice_once,
            read_machine=lambda devices: self._holding(
                source, Machine.here(devices) if is_here else _machine_of(machine)
            ),
            compile_source=self._outlined.program,
        )
        if config.store.flash.path is None:
            needed = store_factory.dram_store_bytes(config, plan.program)
            store_factory.require_dram(config, plan.program, needed)
        prediction = replace(predict(config, plan, machine), length_note=length.note)
        if not is_here:
            require_room_for_shards(prediction)
        else:
            stored = prediction.flash.flash_bytes if prediction.flash else 0
            prediction = replace(prediction, full_disk_note=full_disk_note(config, stored))
            other = other_disk_note(config, machine)
            if other is not None:
                self._notice_once(other)
        return prediction

    def advice(self, prediction: Prediction, *, is_here: bool = False) -> list[Advice]:
        """Return changes that make a predicted run faster; their plans give no notices."""
        quiet = copy.copy(self)
        quiet._notice, quiet._noticed = lambda text: None, set()
        machine = prediction.machine
        return advise(prediction, lambda config: quiet.plan(config, machine, is_here=is_here))

    def plan_on_gpus(
        self, config: Config, cluster: GpuCluster, seconds: float | None = None
    ) -> GpuRun:
        """Return the prediction of a run on a GPU cluster, with its best division.

        Args:
            config: of the run; `engines` is the number of GPUs.
            cluster: the cluster.
            seconds: of the whole run; the fewest GPUs that make it are then taken.

        Raises:
            BudgetError: the run does not fit so many GPUs.
            ConfigError: the run cannot be divided among the GPUs of this cluster.
        """
        source = self._model(config)
        length = self._length(config, source)
        program = self._program(config, source, 1)
        heads = source.structure.number("num_attention_heads") or 1
        figures = figures_of(program, config, 1, length.tokens, heads)
        found = gpu_run(config, source.name, figures, cluster, seconds)
        return replace(found, length_note=length.note)

    def memory(self, config: Config) -> ModelMemory:
        """Return the memory that a model needs on any machine.

        An engine computes one micro-batch with the configured recomputation.
        """
        source = self._model(config)
        micro = config.batch.size if config.batch.micro == "auto" else int(config.batch.micro)
        program = self._program(config, source, micro)
        plan = plan_engine(program, 1, None, config.engine.recompute, _DESCRIBED)
        roles = store_factory.optimizer_of(config).roles
        width = 4 if config.gradient_precision == "fp32" else 2
        state = (
            width * weight.entries + sum(role.bytes(weight.entries) for role in roles)
            for weight in program.weights.values()
            if weight.trainable
        )
        return ModelMemory(
            program.parameters,
            sum(weight.stored_bytes for weight in program.weights.values()) + sum(state),
            predict_bytes(program, 1, plan, _DESCRIBED).peak_bytes,
            largest_stage(program, lambda weight: weight.stream_bytes)[1],
        )

    def _holding(self, model: ModelSource, machine: Machine) -> Machine:
        """Return the machine as training sees it, whose program is in the cache: it compiles
        nothing, and records only a model that is not remembered."""
        resident = self._libraries if model.key is not None else self._recorded_bytes
        assert resident is not None
        return machine.holding(resident)

    def _model(self, config: Config) -> ModelSource:
        if self._libraries is None:  # before the first model
            self._libraries = library_bytes(self._keeps_libraries)
        model = self._outlined.model(config)
        if model.key is None and self._recorded_bytes is None:
            self._recorded_bytes = process_memory.resident_bytes()
        return model

    def _source_of(self, config: Config) -> ModelSource:
        return model_sources.source_of(config, None, False, self._notice_once)

    def _length(self, config: Config, source: ModelSource) -> PlannedLength:
        """Return the tokens per sequence; each data set is read once."""
        key = f"{config.data_dir} {config.data}", id(source)
        if key not in self._lengths:
            self._lengths[key] = planned_length(config, source)
        found = self._lengths[key]
        if found.note is not None:
            self._notice_once(found.note)
        return found

    def _program(self, config: Config, source: ModelSource, micro_batch: int) -> Program:
        """Return the program as `plan_execution` compiles it for a described engine."""
        return self._outlined.program(
            source,
            micro_batch=micro_batch,
            length=self._length(config, source).tokens,
            precision=config.precision,
            device=_DESCRIBED,
            products=target_of(_DESCRIBED).products_as_recorded(None, _PROCESSOR),
            train=config.train,
            freeze=config.freeze,
            bfloat16=selected_weights.kept_as_bfloat16(config, source),
            sparse=None,
            slot_bytes=None,
        )

    def _notice_once(self, text: str) -> None:
        if text not in self._noticed:
            self._noticed.add(text)
            self._notice(text)


def _compile_source(source: ModelSource, **options: Any) -> Program:
    from penstock.planning import builders  # which imports all that traces

    return builders.compile_source(source, **options)


def _as_on(machine: MachineDescription, config: Config) -> Config:
    """Return the configuration with its engines where the machine has them.

    The memory of a wafer belongs to the engine alone; of other engines' own memory, training takes
    a part.
    """
    if machine.kind == "wafer" and config.engine.memory == "auto" and machine.engine.memory:
        whole = config.engine.model_copy(update={"memory": machine.engine.memory})
        config = config.model_copy(update={"engine": whole})
    if machine.link is None or config.cluster.start != "none":
        return config
    cluster = config.cluster.model_copy(update={"start": "listen"})
    return config.model_copy(update={"cluster": cluster})


def _machine_of(machine: MachineDescription) -> Machine:
    """Return the state of a described machine: all of its memory is free."""
    memory = int(machine.store.memory)
    here = process_memory.resident_bytes()
    devices = {}
    if machine.engine.memory is not None:
        own = int(machine.engine.memory)
        devices[_DESCRIBED] = DeviceMemory(own, own)
    return Machine(
        _PROCESSOR,
        cores=machine.store.cores,
        resident_bytes=here,
        available_bytes=memory - here,
        devices=devices,
        micro_batch_tokens=machine.engine.micro_batch_tokens,
    )
