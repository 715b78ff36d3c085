"""From a configuration to the model that it trains.

A model of `transformers` that is fully described by its configuration is recorded once on a
machine, and recalled afterwards (`program_cache/remembered.py`). The same holds for a model in a
Hugging Face folder; its values are read from the folder's files each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from penstock.config import (
    Config,
    FactoryModel,
    HuggingFaceConfigModel,
    HuggingFaceModel,
    LoraConfig,
    ModelSpec,
    PresetModel,
    read_model_file,
)
from penstock.errors import ConfigError
from penstock.models import KEPT, ModelSource, OpenedFolder, verify_kept
from penstock.planning.program_cache import remembered_folder, remembered_model

if TYPE_CHECKING:
    from penstock.store import Base, ReadBase


def model_source(
    spec: ModelSpec, kept: Path | None = None, needs_base: bool = False
) -> ModelSource:
    """Return the model that a configuration's `model` section describes.

    `kept` is the run's copy of the small files of `model.hf`, for a run with weights of its own.
    The folder of `model.hf` is then needed only if checkpoints omit frozen weights.
    """
    if isinstance(spec, PresetModel):
        return remembered_model(spec, lambda: ModelSource.from_preset(spec.preset, spec.overrides))
    if isinstance(spec, HuggingFaceModel):
        if kept is not None and kept.is_dir():
            verify_kept(kept)
            if needs_base:
                return _with_base(spec, kept)
            return remembered_folder(OpenedFolder.without_weights(kept, spec.overrides))
        folder = Path(spec.hf)
        return remembered_folder(
            OpenedFolder.with_weights(folder, spec.overrides, spec.ignore, weights=folder)
        )
    if isinstance(spec, HuggingFaceConfigModel):
        return _configured(spec.hf_config)
    assert isinstance(spec, FactoryModel)
    return ModelSource.from_factory(spec.factory, spec.args, loss=spec.loss, task=spec.task)


def _configured(given: str | dict[str, Any]) -> ModelSource:
    """Return the model of a Hugging Face configuration, or of the file of one.

    The file is read now; it may change or be removed before the model is recorded.
    """
    fields = read_model_file(given) if isinstance(given, str) else given
    if fields is None:
        return ModelSource.from_hf_config(given)  # whose errors name the file

    def record() -> ModelSource:
        is_there = isinstance(given, str) and read_model_file(given) == fields
        return ModelSource.from_hf_config(given if is_there else fields)

    return remembered_model(HuggingFaceConfigModel(hf_config=fields), record)


def _with_base(spec: HuggingFaceModel, kept: Path) -> ModelSource:
    """Return the model of `model.hf` with its weights; other files come from the run's copy."""
    folder = Path(spec.hf)
    if not folder.is_dir():
        raise ConfigError(
            f"model.hf: {folder} does not exist, but the checkpoints of this run need its frozen "
            "weights; restore the folder, or set model.hf to a copy"
        )
    return remembered_folder(
        OpenedFolder.with_weights(kept, spec.overrides, spec.ignore, weights=folder)
    )


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
    from penstock.models import WeightFiles

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
        from penstock.models import require_clear

        require_clear(model)
        return ModelSource.from_module(model)
    if config.model is None:
        raise ConfigError("model: expected a preset or a mapping; from Python, Trainer(model=...)")
    return model_source(config.model, config.run.dir / KEPT if is_resumed else None, needs_base)
