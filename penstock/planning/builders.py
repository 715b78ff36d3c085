"""Builders from a configuration to the parts of a run: model, program, data, store, engines.

Each function builds one part; the trainer combines the parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from penstock.compiler import (
    CompileOptions,
    Precision,
    Products,
    compile_module,
    refuse_gradient_hooks,
)
from penstock.config import (
    Config,
    FactoryModel,
    HuggingFaceConfigModel,
    HuggingFaceModel,
    LoraConfig,
    ModelSpec,
    PresetModel,
)
from penstock.engine import (
    Engine,
    EnginePlan,
    SparseWeights,
    keep_freed_pages,
    return_freed_pages,
    target_of,
)
from penstock.errors import ConfigError
from penstock.kernels.processor import Processor
from penstock.models import KEPT, ModelSource, WeightFiles, require_clear, verify_kept
from penstock.planning.program_cache import cached_program
from penstock.planning.selected_weights import kept_as_bfloat16, sparse_weights_of
from penstock.planning.sequence_lengths import shown_length
from penstock.program import Program

if TYPE_CHECKING:
    from penstock.planning.memory_budget import MemoryShares
    from penstock.store import Base, ReadBase


def model_source(
    spec: ModelSpec, kept: Path | None = None, needs_base: bool = False
) -> ModelSource:
    """Return the model that a configuration's `model` section describes.

    `kept` is the run's copy of the small files of `model.hf`, for a run with weights of its own.
    The folder of `model.hf` is then needed only if checkpoints omit frozen weights.
    """
    if isinstance(spec, PresetModel):
        return ModelSource.from_preset(spec.preset, spec.overrides)
    if isinstance(spec, HuggingFaceModel):
        if kept is not None and kept.is_dir():
            verify_kept(kept)
            if needs_base:
                return _with_base(spec, kept)
            return ModelSource.without_weights(kept, spec.overrides)
        return ModelSource.from_hf(spec.hf, spec.overrides, ignore=spec.ignore)
    if isinstance(spec, HuggingFaceConfigModel):
        return ModelSource.from_hf_config(spec.hf_config)
    assert isinstance(spec, FactoryModel)
    return ModelSource.from_factory(spec.factory, spec.args, loss=spec.loss, task=spec.task)


def _with_base(spec: HuggingFaceModel, kept: Path) -> ModelSource:
    """Return the model of `model.hf` with its weights; other files come from the run's copy."""
    folder = Path(spec.hf)
    if not folder.is_dir():
        raise ConfigError(
            f"model.hf: {folder} does not exist, but the checkpoints of this run need its frozen "
            "weights; restore the folder, or set model.hf to a copy"
        )
    return ModelSource.from_hf(kept, spec.overrides, ignore=spec.ignore, weights=folder)


def base_reader(config: Config, base: Base) -> ReadBase:
    """Return the reader of the base weights that a run's checkpoints omit.

    **Raises:** `ConfigError` if the base folder is missing or has other weights.
    """
    if config.model is None:
        raise ConfigError(
            f"{config.run.dir} trains a model given from Python, and its checkpoints need the "
            "frozen weights of that model: use Trainer(config, model=...)"
        )
    source = model_source(config.model, config.run.dir / KEPT, needs_base=True)
    base.require(source.weights_fingerprint(), source.weights_folder)
    return functools.partial(source.initial_weights, config.run.seed)


def folder_fingerprint(config: Config, source: ModelSource) -> str | None:
    """Return the fingerprint of the run's initial weights, if their folder is present."""
    if not isinstance(config.model, HuggingFaceModel):
        return source.weights_fingerprint()
    folder = Path(config.model.hf)
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return None
    return WeightFiles(folder).fingerprint()


def with_adapters(source: ModelSource, lora: LoraConfig) -> ModelSource:
    """Return the model with the adapters of `lora`; unchanged if `lora` configures none."""
    if lora.rank is None:
        return source
    return source.with_adapters(
        rank=lora.rank, alpha=lora.alpha, targets=lora.targets, dropout=lora.dropout
    )


def source_of(
    config: Config,
    model: nn.Module | ModelSource | None,
    is_resumed: bool,
    notice: Callable[[str], None],
    needs_base: bool = False,
    buffer_seed: int | None = None,
) -> ModelSource:
    """Return the model that a run trains, given or configured, with its adapters.

    A run that `is_resumed` has its own copy of weights and small files. A run that `needs_base` has
    checkpoints that omit frozen weights, so the base folder is needed. `buffer_seed` is the seed
    that a run has recorded for its buffers; that of a new run is `run.seed`.
    """
    source = _base_of(config, model, is_resumed, needs_base)
    source = source.with_buffer_seed(config.run.seed if buffer_seed is None else buffer_seed)
    for note in () if is_resumed else source.notes:
        notice(note)
    return with_adapters(source, config.lora)


def _base_of(
    config: Config, model: nn.Module | ModelSource | None, is_resumed: bool, needs_base: bool
) -> ModelSource:
    if isinstance(model, ModelSource):
        return model
    if model is not None and not isinstance(model, nn.Module):
        raise ConfigError(
            f"Trainer(model=...): expected an nn.Module or a ModelSource, got {model!r}"
        )
    if model is not None:
        require_clear(model)
        return ModelSource.from_module(model)
    if config.model is None:
        raise ConfigError("model: expected a preset or a mapping; from Python, Trainer(model=...)")
    return model_source(config.model, config.run.dir / KEPT if is_resumed else None, needs_base)


def compile_source(
    source: ModelSource,
    *,
    micro_batch: int,
    length: int,
    precision: Precision,
    device: str = "cpu",
    products: Products | None = None,
    train: Sequence[str] = (),
    freeze: Sequence[str] = (),
    bfloat16: Collection[str] = (),
    sparse: Mapping[str, int] | None = None,
    goal: Literal["train", "evaluate", "logits"] = "train",
    with_buffers: bool = True,
    slot_bytes: int | None = None,
    known: Program | None = None,
) -> Program:
    """Compile a model for one micro-batch of sequences.

    The goal `evaluate` computes the loss without dropout and, for language models, the most likely
    label of each token. The goal `logits` computes the logits. Both goals run only the forward
    sweep, with every module in eval mode. `products` is the library of matrix products (None: the
    choice of a new run on this host). `bfloat16` are the weights that the store keeps as bfloat16,
    `sparse` the sparse weights with the most entries that each has. `known` is returned if its
    source graph equals the model's graph. Programs of presets and of Hugging Face configurations
    are kept on disk between processes (`program_cache`).
    """
    target = target_of(device)
    inputs = source.example_inputs(micro_batch, length)
    module = source.module
    if goal == "logits":
        module = source.logits_module
        inputs = {name: value for name, value in inputs.items() if name not in source.targets}
    elif goal == "evaluate":
        module = source.evaluation_module
    modes = [(child, child.training) for child in module.modules()]
    if goal == "train":  # on fake tensors, parameters lose their owner's attributes
        refuse_gradient_hooks(source.original)
    if goal != "train":  # training keeps the mode that each module's owner has set
        module.eval()
    options = CompileOptions(
        precision=precision,
        device=target.trace_device,
        products=products or target.choose_products(Processor.here()),
        train=tuple(train),
        freeze=tuple(freeze),
        adapters=source.adapter_weights,
        bfloat16=frozenset(bfloat16),
        sparse=dict(sparse or {}),
        slot_bytes=slot_bytes,
        weight_prefix=source.weight_prefix,
        training=goal == "train",
    )

    def compile_now() -> Program:
        buffers = (lambda: _buffers(source)) if with_buffers else None
        return compile_module(
            module, inputs, options, name=source.name, buffers=buffers, known=known
        )

    try:
        return cached_program(source, module, inputs, options, with_buffers, known, compile_now)
    finally:
        for child, training in modes:
            child.training = training


def _buffers(source: ModelSource) -> dict[str, torch.Tensor]:
    """Return the real buffers under all their names."""
    real = source.buffers.values()
    known = {alias: real[name] for alias, name in source.aliases.items() if name in real}
    return {**known, **real}


def build_program(
    config: Config, *, micro_batch: int, sequence_length: int | None, precision: str
) -> Program:
    """Compile a model for inspection: no memory of a weight's size is allocated.

    **Arguments:** `sequence_length` None is that of the run (`shown_length`).
    """
    source = with_adapters(_base_of(config, None, False, False), config.lora)
    length = sequence_length or shown_length(config, source)
    sparse = sparse_weights_of(config, source)
    return compile_source(
        source,
        micro_batch=micro_batch,
        length=length,
        precision="bf16" if precision == "bf16" else "fp32",
        train=config.train,
        freeze=config.freeze,
        bfloat16=kept_as_bfloat16(config, source),
        sparse=sparse.capacities if sparse is not None else None,
        with_buffers=False,
    )


def make_engines(
    program: Program,
    plan: EnginePlan,
    shares: MemoryShares,
    engines: int,
    device: str,
    sparse: SparseWeights | None = None,
) -> list[Engine]:
    """Return this many engines of this process, each with its own budget.

    They share what is derived from the masks of `sparse` weights.
    """
    target = target_of(device)
    return [
        target.make_engine(program, plan, budget_bytes=shares.engine, sparse=sparse)
        for _ in range(engines)
    ]


def settle_pages(shares: MemoryShares, device: str) -> None:
    """Let the C library keep the pages of freed tensors if memory suffices, else return them."""
    if target_of(device).has_own_memory:
        return
    if shares.keep_pages:
        keep_freed_pages()
    else:
        return_freed_pages()
