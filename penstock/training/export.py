"""Export of a run's weights as a Hugging Face folder: from a store, a checkpoint, or flash.

The export of a run builds neither a program nor a store. Weights are copied from file to file in
pieces, and each checksum is verified on the way.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock import store
from penstock.config import Config, HuggingFaceModel, PresetModel
from penstock.data import TokenDataset, export_tokenizer, load_tokenizer
from penstock.errors import ConfigError, few
from penstock.models import KEPT, ModelSource, other_files, tokenizer_files
from penstock.planning import builders, selected_weights
from penstock.store import (
    MAX_SHARD_BYTES,
    MergedWeights,
    SavedWeights,
    WeightReader,
    export_huggingface,
    export_packed,
    find_checkpoint,
    read_state,
)
from penstock.store.flash import open_reader

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_run(
    config: Config,
    folder: Path,
    dtype: str,
    max_shard_bytes: int,
    *,
    only_adapters: bool = False,
    packed: bool = False,
) -> list[Path]:
    """Write the newest state of a run, or only its adapters; return the weight files.

    With `packed`, sparse weights are written as values and masks.

    Raises:
        ConfigError: the run has no trained state yet, `packed` and no sparse weights, or the folder
            is in use.
        CorruptionError: a checksum does not match.
        StorageError: the disk is full, or another process trains the run on flash.
    """
    if config.model is None:
        raise ConfigError(
            f"{config.run.dir} trains a module given from Python; export it there: "
            "Trainer(config, model=...).export(FOLDER)"
        )
    with _newest(config, only_trained=only_adapters) as weights:
        base = builders.model_source(config.model, config.run.dir / KEPT)
        source = builders.with_adapters(base, config.lora)
        if only_adapters:
            return export_adapters(config, weights, source, folder, dtype)
        data = config.data_dir
        dataset = TokenDataset.open(data) if data.exists() else None
        return export(weights, source, dataset, folder, dtype, max_shard_bytes, packed=packed)


@contextmanager
def _newest(config: Config, only_trained: bool) -> Iterator[WeightReader]:
    """Open the newest state; with `only_trained`, frozen weights may be unavailable."""
    run, flash = config.run.dir, config.store.flash.path
    if flash is not None:
        with open_reader(flash) as reader:
            if not reader.steps:
                raise ConfigError(f"{flash}: no durable step yet, so there is nothing to export")
            yield reader
        return
    latest = find_checkpoint(run / "checkpoints", "latest")
    if latest is None:
        raise ConfigError(
            f"{run} holds no checkpoint: nothing was trained there yet; run `penstock train` first"
        )
    base = read_state(latest).base
    needed = base is not None and not only_trained
    yield SavedWeights(latest, builders.base_reader(config, base) if base and needed else None)


def export(
    weights: WeightReader,
    source: ModelSource,
    dataset: TokenDataset | None,
    folder: Path,
    dtype: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    packed: bool = False,
) -> list[Path]:
    """Write weights as a Hugging Face folder, with the tokenizer and the model's other files.

    Adapters are merged into their base weights. With `packed`, sparse weights are written as values
    and masks, in one file that only Penstock reads.
    """
    element = _element(dtype)
    config = source.hf_config.to_dict() if source.hf_config is not None else {}
    config["architectures"] = [source.class_name]
    others = other_files(source.folder) if source.folder is not None else []
    whole = MergedWeights(weights, source.adapters)
    with tempfile.TemporaryDirectory() as scratch:
        files = [*_tokenizer(source, dataset, Path(scratch)), *others]
        if packed:
            return export_packed(whole, folder, config=config, dtype=element, files=files)
        return export_huggingface(
            whole,
            folder,
            config=config,
            dtype=element,
            files=files,
            max_shard_bytes=max_shard_bytes,
        )


def export_adapters(
    config: Config, weights: WeightReader, source: ModelSource, folder: Path, dtype: str
) -> list[Path]:
    """Write only the adapters, in PEFT's format.

    Raises:
        ConfigError: the run has no adapters, or it has also trained other weights.
    """
    if not source.adapters:
        raise ConfigError(
            f"{source.name} was trained without adapters (lora.rank is null); export the model"
        )
    others = sorted(selected_weights.trained_weights(config, source) - source.adapter_weights)
    if others:
        raise ConfigError(
            f"training changed more than the adapters: {few(others)}; export the whole model, "
            "without --adapters"
        )
    return store.export_adapters(
        weights,
        folder,
        source.adapters,
        task=source.task,
        base=_base(config),
        dtype=_element(dtype),
    )


def _base(config: Config) -> str | None:
    """Return the base of the adapters: a folder's absolute path, or a preset's name."""
    if isinstance(config.model, HuggingFaceModel):
        return str(Path(config.model.hf).absolute())
    return config.model.preset if isinstance(config.model, PresetModel) else None


def _element(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _tokenizer(source: ModelSource, dataset: TokenDataset | None, scratch: Path) -> list[Path]:
    """Return the tokenizer's files: the model's own if the data set was built with them."""
    own = tokenizer_files(source.folder) if source.folder is not None else []
    if dataset is None:
        return own
    tokenizer = dataset.tokenizer()
    is_fast = any(path.name == "tokenizer.json" for path in own)
    if is_fast and load_tokenizer(str(source.folder)).to_json() == tokenizer.to_json():
        return own
    export_tokenizer(tokenizer, scratch, source.max_sequence_length)
    return sorted(scratch.iterdir())
