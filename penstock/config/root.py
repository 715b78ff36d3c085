"""The whole configuration of a run, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from penstock.config.batch import BatchConfig
from penstock.config.checkpoint import CheckpointConfig
from penstock.config.cluster import ClusterConfig
from penstock.config.data import DataConfig
from penstock.config.engine import EngineConfig
from penstock.config.evaluation import EvaluationConfig
from penstock.config.fabric import FabricConfig
from penstock.config.logging import LoggingConfig
from penstock.config.lora import LoraConfig
from penstock.config.model import (
    HuggingFaceConfigModel,
    HuggingFaceModel,
    ModelField,
    PresetModel,
)
from penstock.config.optimizer import OptimizerConfig
from penstock.config.presets import resolve_preset
from penstock.config.problems import Origin, explain
from penstock.config.run import RunConfig
from penstock.config.schedule import DECAYING
from penstock.config.section import Patterns, Section, refuse, section, setting
from penstock.config.size import ByteSize
from penstock.config.sparsity import (
    SparsityConfig,
    check_places,
    places_as_steps,
)
from penstock.config.store import StoreConfig
from penstock.errors import ConfigError


class Config(Section):
    """All settings of a run. Created by `load`, `Config.from_mapping`, or its constructor."""

    model: ModelField | None = Field(
        default=None,
        description=(
            "What to train: a preset's name, or a mapping with preset, hf, hf_config or factory; "
            "null only if the module is given from Python"
        ),
    )
    data: DataConfig = section(DataConfig, "the training text")
    batch: BatchConfig = section(BatchConfig, "sequences per step")
    precision: Literal["fp32", "bf16"] = setting(
        "fp32",
        (
            "type of the arithmetic and of the streamed weights; the store's master weights are "
            "fp32 in both"
        ),
    )
    optimizer: OptimizerConfig = section(OptimizerConfig, "the update rule")
    freeze: Patterns = setting(
        (),
        "patterns of weight names that are not trained: no gradient, no state",
        example=["*.wte.*"],
    )
    train: Patterns = setting(
        (),
        "patterns of weight names: only these are trained, except those that `freeze` matches; "
        "empty: all, or with `lora` only the adapters",
        example=["*.ln_*"],
    )
    lora: LoraConfig = section(LoraConfig, "low-rank adapters beside frozen weights")
    sparsity: SparsityConfig = section(
        SparsityConfig, "weights of which only some entries are stored, streamed and trained"
    )
    memory: ByteSize | None = setting(
        None,
        "memory limit of the whole process, such as 10GiB; if `store.dram` or `engine.memory` is "
        "`auto`, its size is chosen within this limit; null: the free memory of the machine",
        unit="bytes",
        example="10GiB",
    )
    store: StoreConfig = section(StoreConfig, "where weights and optimizer state live")
    engine: EngineConfig = section(EngineConfig, "the device that computes")
    engines: int = setting(
        1, "number of engines; the result is the same to the bit for any", ge=1, le=1024
    )
    cluster: ClusterConfig = section(ClusterConfig, "where engines run")
    fabric: FabricConfig = section(FabricConfig, "what lies between store and engines")
    run: RunConfig = section(RunConfig, "the run's folder, length and seed")
    evaluation: EvaluationConfig = section(EvaluationConfig, "held-out loss during training")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "saving")
    logging: LoggingConfig = section(LoggingConfig, "log output during training")

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        schedule = self.optimizer.schedule
        if schedule.name in DECAYING and schedule.warmup_steps >= self.decay_steps:
            end = "optimizer.schedule.decay_steps" if schedule.decay_steps else "run.steps"
            raise refuse(
                "optimizer.schedule.warmup_steps",
                f"expected fewer than the {self.decay_steps} steps over which the rate decays, "
                f"got {schedule.warmup_steps}; lower it or raise {end}",
            )
        flash = self.store.flash
        if self.store.holders > 1 and flash.path is not None and flash.keep_steps < 2:
            above = "shards" if self.store.shards > 1 else "replicas"
            raise refuse(
                "store.flash.keep_steps",
                f"expected 2 or more with store.{above} above 1, got 1; a crash may leave shards "
                "one durable step apart, and the run continues from the last step that all shards "
                "hold",
            )
        if self.store.replicas > 1 and self.cluster.shards != "apart":
            raise refuse(
                "store.replicas",
                f"expected 1 with cluster.shards: {self.cluster.shards}, got "
                f"{self.store.replicas}; a replica in the same process would be lost with it: set "
                "cluster.shards to apart",
            )
        if self.fabric.relays not in ("auto", 0) and self.cluster.start == "none":
            raise refuse(
                "fabric.relays",
                f"expected auto or 0 with cluster.start: none, got {self.fabric.relays}; relays "
                "are processes of their own: set cluster.start to local, ray or listen",
            )
        self._check_length()
        self._check_devices()
        self._check_wafer()
        self._check_sparsity()
        if self.batch.size < self.engines:
            raise refuse(
                "engines",
                f"expected at most batch.size {self.batch.size}, got {self.engines}; "
                "each engine needs a sequence",
            )
        return self

    def _check_length(self) -> None:
        """Refuse sequences that a preset does not take before a data set is built."""
        length = self.data.sequence_length
        if not isinstance(self.model, PresetModel) or length is None:
            return
        preset = resolve_preset(self.model.preset, self.model.overrides)
        if preset.longest_sequence is not None and length > preset.longest_sequence:
            raise refuse(
                "data.sequence_length",
                f"expected at most {preset.longest_sequence}, the number of positions of "
                f"{preset.name}, got {length}; lower it, or raise model.{preset.positions}",
            )

    def _check_devices(self) -> None:
        devices = self.engine.devices
        if devices is None:
            return
        if self.cluster.start != "none":
            raise refuse(
                "engine.devices",
                f"expected null with cluster.start: {self.cluster.start}, whose engines have a "
                "device each; set engines to their number",
            )
        if devices == "all":
            if self.engines != 1:
                raise refuse(
                    "engines",
                    f"expected 1 with engine.devices: all, which makes one per GPU, got "
                    f"{self.engines}; leave it out",
                )
            return
        if self.engines not in (1, len(devices)):
            raise refuse(
                "engines",
                f"expected {len(devices)}, one per device of engine.devices, got {self.engines}; "
                "leave it out",
            )
        if self.batch.size < len(devices):
            raise refuse(
                "engine.devices",
                f"expected at most batch.size {self.batch.size} devices, got {len(devices)}; each "
                "needs a sequence",
            )

    def _check_wafer(self) -> None:
        if self.engine.device != "wafer":
            return
        if self.cluster.start != "none":
            raise refuse(
                "engine.device",
                f"expected auto, cpu or cuda with cluster.start: {self.cluster.start}, got wafer: "
                "cycles are counted in the process that trains; set cluster.start to none",
            )
        if self.engine.cycles == "simulated" and self.precision != "fp32":
            raise refuse(
                "precision",
                f"expected fp32 with engine.cycles: simulated, got {self.precision}: the simulated "
                "cores compute with 32-bit numbers; set engine.cycles to closed_form, or precision "
                "to fp32",
            )

    def _check_sparsity(self) -> None:
        if self.sparsity.method is None:
            return
        check_places(self.sparsity, self.run.steps)
        is_random = isinstance(self.model, PresetModel | HuggingFaceConfigModel)
        if self.sparsity.initial_mask == "zeros" and is_random:
            raise refuse(
                "sparsity.initial_mask",
                "expected weights with zeros for initial_mask: zeros, such as those of model.hf; "
                "this model starts with random weights: choose another initial_mask",
            )

    @classmethod
    def from_mapping(
        cls, data: Mapping[str, Any], overrides: Sequence[str] = (), origin: Origin | None = None
    ) -> Config:
        """Return the configuration from a plain mapping and `key=value` overrides.

        Raises `ConfigError` with one line per problem, each naming the key and its place.
        """
        from penstock.config.overrides import apply_overrides

        origin = origin or Origin()
        merged = apply_overrides(data, overrides, origin)
        try:
            return cls.model_validate(merged)
        except ValidationError as error:
            raise ConfigError(explain(error, cls, origin)) from None

    @property
    def decay_steps(self) -> int:
        """The step at which a decaying schedule ends."""
        return self.optimizer.schedule.decay_steps or self.run.steps

    def more_steps(self, done: int) -> str:
        """Return the overrides under which a run that has `done` steps can continue."""
        more = f"run.steps={2 * done}"
        for key, step in places_as_steps(self.sparsity, self.run.steps).items():
            more += f" sparsity.{key}={step}"
        if self.optimizer.schedule.name not in DECAYING:
            return more
        return f"{more} optimizer.schedule.decay_steps={self.decay_steps}, at the final rate"

    @property
    def gradient_precision(self) -> Literal["fp32", "bf16"]:
        """The type of stored gradients, with `auto` resolved."""
        return self.precision if self.store.gradients == "auto" else self.store.gradients

    @property
    def data_dir(self) -> Path:
        """The folder of the data set: `data.path`, or the run's own."""
        return self.data.path or self.run.dir / "data"

    @property
    def tokenizer(self) -> str:
        """The tokenizer of a data set that is not built yet, with `auto` resolved."""
        if self.data.tokenizer != "auto":
            return self.data.tokenizer
        return self.model.hf if isinstance(self.model, HuggingFaceModel) else "bytes"

    def to_mapping(self) -> dict[str, Any]:
        """Return the configuration as JSON-able values; `from_mapping` restores it."""
        return self.model_dump(mode="json")

    def dump_yaml(self) -> str:
        """Return the configuration as YAML without comments; loading it gives this again."""
        from penstock.config.document import dump

        return dump(self.to_mapping())
