"""Export of a run's weights as a Hugging Face folder: from a store, a checkpoint, or flash.

The export of a run builds neither a program nor a store. Weights are copied from file to file in
pieces, and each checksum is verified on the way.
"""

import json
import tempfile
from pathlib import Path

import torch

from penstock import store
from penstock.config import Config, HuggingFaceModel, PresetModel
from penstock.data import TokenDataset, export_tokenizer, load_tokenizer
from penstock.errors import ConfigError, few
from penstock.models import KEPT, ModelSource, other_files, tokenizer_files
from penstock.planning import model_sources, selected_weights
from penstock.store import (
    MAX_SHARD_BYTES,
    MergedWeights,
    WeightReader,
    export_huggingface,
    export_packed,
)
from penstock.training.checkpoint_backends import make_checkpoint_backend
from penstock.training.same_tokenizer import require_same_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_run(
    config: Config,
    folder: Path,
    dtype: str,
    max_shard_bytes: int,
    *,
    only_adapters: bool = False,
    packed: bool = False,
    best: bool = False,
) -> list[Path]:
    """Write the newest state of a run, or only its adapters; return the weight files.

    With `packed`, sparse weights are written as values and masks. With `best`, the checkpoint with
    the lowest held-out loss is written instead of the newest state.

    Raises:
        ConfigError: the run has no such state, `packed` and no sparse weights, or the folder is in
            use.
        DataError: the data set has another tokenizer than that of the run.
        CorruptionError: a checksum does not match.
        StorageError: the disk is full, or another process trains the run on flash.
    """
    if config.model is None:
        raise ConfigError(
            f"{config.run.dir} trains a module given from Python; export it there: "
            "Trainer(config, model=...).export(FOLDER)"
        )
    saved = make_checkpoint_backend(config, best)
    with saved.reader(only_trained=only_adapters) as weights:
        base = model_sources.model_source(config.model, config.run.dir / KEPT)
        if saved.recorded is not None:
            base = base.with_buffer_seed(saved.recorded.buffer_seed)
        source = model_sources.with_adapters(base, config.lora)
        if only_adapters:
            return export_adapters(config, weights, source, folder, dtype)
        data = config.data_dir
        dataset = TokenDataset.described(data) if data.exists() else None
        if dataset is not None and saved.recorded is not None:
            require_same_tokenizer(config, saved.recorded, dataset)
        return export(weights, source, dataset, folder, dtype, max_shard_bytes, packed=packed)


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
    and masks, in one file that only Penstock reads. With the data set's tokenizer, the end and the
    begin of a text are its end-of-document token.
    """
    element = _element(dtype)
    config = source.hf_config.to_dict() if source.hf_config is not None else {}
    config["architectures"] = [source.structure.class_name]
    others = other_files(source.folder) if source.folder is not None else []
    whole = MergedWeights(weights, source.adapters)
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer, end = _tokenizer(source, dataset, Path(scratch))
        if end is not None and source.hf_config is not None and source.task == "causal_lm":
            config |= _ends(end)
            others = [_with_end(path, end, Path(scratch)) for path in others]
        files, buffers = [*tokenizer, *others], source.buffers.persistent()
        if packed:
            return export_packed(
                whole, folder, config=config, dtype=element, files=files, buffers=buffers
            )
        return export_huggingface(
            whole,
            folder,
            config=config,
            dtype=element,
            files=files,
            buffers=buffers,
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
    """Return the absolute path of the base's folder; None if no folder holds the base.

    PEFT looks up any other name on the Hugging Face hub: gpt2 would be the model of OpenAI.
    """
    if isinstance(config.model, HuggingFaceModel):
        return str(Path(config.model.hf).absolute())
    return None


def describe_base(config: Config) -> str:
    """Return a sentence that names the base model of a run's adapters."""
    folder, model = _base(config), config.model
    if folder is not None:
        return f"the base of these adapters is {folder}"
    what = f"preset {model.preset}" if isinstance(model, PresetModel) else "the run's model"
    return (
        f"the base of these adapters is {what} with the initial weights of run.seed "
        f"{config.run.seed}, which no folder holds, so base_model_name_or_path is null: build the "
        f"model after torch.manual_seed({config.run.seed}), or export without --adapters"
    )


def _element(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _tokenizer(
    source: ModelSource, dataset: TokenDataset | None, scratch: Path
) -> tuple[list[Path], int | None]:
    """Return the tokenizer's files: the model's own if the data set was built with them.

    The second value is the end-of-document token of the data set, if the files are the data set's.
    """
    own = tokenizer_files(source.folder) if source.folder is not None else []
    if dataset is None:
        return own, None
    tokenizer = dataset.tokenizer()
    is_fast = any(path.name == "tokenizer.json" for path in own)
    if is_fast and load_tokenizer(str(source.folder)).to_json() == tokenizer.to_json():
        return own, None
    export_tokenizer(tokenizer, scratch, source.max_sequence_length)
    return sorted(scratch.iterdir()), tokenizer.end_of_document


def _ends(end: int) -> dict[str, int]:
    """Return the fields by which `generate` of transformers begins and ends a text."""
    return {"eos_token_id": end, "bos_token_id": end}


def _with_end(path: Path, end: int, scratch: Path) -> Path:
    """Return a file of the model; of its generation settings a copy with the data set's end."""
    if path.name != "generation_config.json":
        return path
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"cannot read {path} as generation settings: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(settings).__name__}")
    copy = scratch / path.name
    copy.write_text(json.dumps({**settings, **_ends(end)}, indent=2) + "\n", encoding="utf-8")
    return copy
