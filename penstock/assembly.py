"""From a configuration to the parts of a run: model, program, data, store, engines.

Each function makes one part and nothing else; the trainer puts them together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from penstock.budget import Shares
from penstock.compiler import CompileOptions, Precision, compile_module, select_trainable
from penstock.config import (
    Config,
    FactoryModel,
    HuggingFaceConfigModel,
    HuggingFaceModel,
    LoraConfig,
    ModelSpec,
    PresetModel,
)
from penstock.data import (
    LanguageModelSource,
    MaskedLanguageModelSource,
    RecordSource,
    Source,
    TokenDataset,
    build_dataset,
    check_vocabulary,
)
from penstock.engine import (
    Engine,
    EnginePlan,
    TorchEngine,
    keep_freed_pages,
    return_freed_pages,
)
from penstock.errors import ConfigError, DataError
from penstock.models import ModelSource, WeightFiles
from penstock.program import Program

_SPARE_VOCABULARY = 2  # times what is used; beyond, it was not meant
_MASK_TOKENS = ("[MASK]", "<mask>")
_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_source(spec: ModelSpec, kept: Path | None = None) -> ModelSource:
    """Return the model that a configuration's `model` section describes.

    `kept` is where a run that has weights of its own keeps the small files of `model.hf`; the
    folder itself is then not needed.
    """
    if isinstance(spec, PresetModel):
        return ModelSource.from_preset(spec.preset, spec.overrides)
    if isinstance(spec, HuggingFaceModel):
        if kept is not None and kept.is_dir():
            return ModelSource.without_weights(kept, spec.overrides)
        return ModelSource.from_hf(spec.hf, spec.overrides, ignore=spec.ignore)
    if isinstance(spec, HuggingFaceConfigModel):
        return ModelSource.from_hf_config(spec.hf_config)
    assert isinstance(spec, FactoryModel)
    return ModelSource.from_factory(spec.factory, spec.args, loss=spec.loss, task=spec.task)


def folder_fingerprint(config: Config, source: ModelSource) -> str | None:
    """Return what tells the weights apart that the run would start from, if these are there."""
    if not isinstance(config.model, HuggingFaceModel):
        return source.weights_fingerprint()
    folder = Path(config.model.hf)
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return None
    return WeightFiles(folder).fingerprint()


def with_adapters(source: ModelSource, lora: LoraConfig) -> ModelSource:
    """Return the model with the adapters that `lora` asks for; as it is if it asks for none."""
    if lora.rank is None:
        return source
    return source.with_adapters(
        rank=lora.rank, alpha=lora.alpha, targets=lora.targets, dropout=lora.dropout
    )


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> str:
    """Return "cpu" or "cuda"; `auto` takes a GPU if there is one."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device: expected cpu, got cuda, which this machine has not")
    return wanted


def trained_weights(config: Config, source: ModelSource) -> frozenset[str]:
    """Return the names of the weights that a run trains.

    **Raises:** `ConfigError` for a pattern of `train` or `freeze` that has no effect.
    """
    aliases: dict[str, list[str]] = {name: [] for name in source.shapes()}
    for other, first in source.aliases.items():
        if first in aliases:  # buffers may be tied too
            aliases[first].append(other)
    return select_trainable(
        aliases,
        source.trainable,
        train=config.train,
        freeze=config.freeze,
        adapters=source.adapter_weights,
    )


def sequence_length(
    config: Config, source: ModelSource, dataset: TokenDataset | None = None
) -> int:
    """Return the tokens per sequence: as configured, or all that the model takes.

    Of records no more than the longest needs, since the rest of every row would be padding.
    """
    length = config.data.sequence_length or source.max_sequence_length
    if not config.data.sequence_length and dataset is not None and dataset.content == "records":
        longest = max(dataset.records(split).longest() for split in dataset.splits)
        return longest if length is None else min(longest, length)
    if length is None:
        if source.task == "custom":
            return 1
        raise ConfigError(
            f"data.sequence_length: {source.name} does not say how long its sequences may be; "
            "set it"
        )
    return length


def compile_source(
    source: ModelSource,
    *,
    micro_batch: int,
    length: int,
    precision: Precision,
    device: str = "cpu",
    train: Sequence[str] = (),
    freeze: Sequence[str] = (),
    goal: Literal["train", "evaluate", "logits"] = "train",
    with_buffers: bool = True,
    slot_bytes: int | None = None,
) -> Program:
    """Compile a model for one micro-batch of sequences.

    `evaluate` returns the loss without dropout and, of language models, the most likely label of
    each token; `logits` what comes before the loss. Both are only run forward.
    """
    inputs = source.example_inputs(micro_batch, length)
    module = source.module
    if goal == "logits":
        module = source.logits_module
        inputs = {name: value for name, value in inputs.items() if name not in source.targets}
    elif goal == "evaluate":
        module = source.evaluation_module
    modes = [(child, child.training) for child in module.modules()]
    if goal != "train":  # for training, every module is in the mode that its owner left it in
        module.eval()
    try:
        return compile_module(
            module,
            inputs,
            CompileOptions(
                precision=precision,
                device=device,
                train=tuple(train),
                freeze=tuple(freeze),
                adapters=source.adapter_weights,
                slot_bytes=slot_bytes,
                weight_prefix=source.weight_prefix,
                training=goal == "train",
            ),
            name=source.name,
            buffers=(lambda: _buffers(source)) if with_buffers else None,
        )
    finally:
        for child, training in modes:
            child.training = training


def _buffers(source: ModelSource) -> dict[str, torch.Tensor]:
    """Return the real buffers under every name that they have."""
    real = source.buffers()
    known = {alias: real[name] for alias, name in source.aliases.items() if name in real}
    return {**known, **real}


def make_engines(
    program: Program, plan: EnginePlan, shares: Shares, engines: int, device: str
) -> list[Engine]:
    """Return that many engines of this process, each with its own budget."""
    return [
        TorchEngine(program, plan, device=device, budget_bytes=shares.engine)
        for _ in range(engines)
    ]


def settle_pages(shares: Shares, device: str) -> None:
    """Let the C library keep the pages of tensors that die, or give them back, as there is room."""
    if device == "cpu" and shares.keep_pages:
        keep_freed_pages()
    elif device == "cpu":
        return_freed_pages()


@dataclass(frozen=True)
class TrainingData:
    """The sources of training and held-out batches; `dataset` where they come from text.

    `sequence_length` is the tokens of a row, 1 where rows are not of tokens.
    """

    training: Source
    held_out: Source | None
    dataset: TokenDataset | None
    sequence_length: int


def open_data(config: Config, source: ModelSource, notice: Callable[[str], None]) -> TrainingData:
    """Open the configured data set, building it first if it is to be made from `data.input`."""
    if source.task == "custom" and set(source.inputs) != {"input_ids", "labels"}:
        raise DataError(
            f"{source.name} is a module of your own: give its data from Python, "
            "Trainer(config, source=ArraySource(...))"
        )
    folder = config.data_dir
    if not folder.exists() and config.data.input:
        notice(f"building the data set {folder} from {', '.join(config.data.input)}")
        report = build_dataset(
            config.data.input,
            config.tokenizer,
            folder,
            validation=config.data.validation,
            seed=config.data.seed,
            content=config.data.content,
            prompt_field=config.data.prompt_field,
            completion_field=config.data.completion_field,
        )
        for note in report.notes:
            notice(note)
    dataset = TokenDataset.open(folder)
    _check_content(config, source, dataset)
    _check_tokenizer(config, dataset)
    if source.vocab_size is not None:
        check_vocabulary(dataset, source.vocab_size)
        if source.vocab_size > _SPARE_VOCABULARY * dataset.vocab_size:
            notice(
                f"the model has a vocabulary of {source.vocab_size}, the data set uses "
                f"{dataset.vocab_size}: most rows of its embedding never train; set the model's "
                f"vocab_size to {dataset.vocab_size}, or a little more"
            )
    length = sequence_length(config, source, dataset)

    def split(name: str) -> Source:
        if dataset.content == "records":
            records = RecordSource(dataset, name, length, config.data.seed)
            for text in (records.describe(), *records.warnings()):
                notice(text)
            return records
        if source.task == "masked_lm":
            mask = _mask_token(dataset, source)
            return MaskedLanguageModelSource(dataset, name, length, mask, config.data.seed)
        return LanguageModelSource(dataset, name, length, config.data.seed)

    held_out = "validation" if "validation" in dataset.splits else None
    return TrainingData(split("train"), split(held_out) if held_out else None, dataset, length)


def _check_content(config: Config, source: ModelSource, dataset: TokenDataset) -> None:
    """Refuse records where they cannot be trained on, and text where records are asked for."""
    if dataset.content == "text" and config.data.content == "records":
        raise DataError(
            f"data.content: expected a data set of records, {dataset.path} holds plain text; name "
            "another folder in data.path to build one there, or set data.content: text"
        )
    if dataset.content == "records" and source.task != "causal_lm":
        raise DataError(
            f"{dataset.path} holds prompts with completions, which a model learns to continue by "
            f"next-token prediction (task causal_lm); {source.name} is trained for {source.task}: "
            "build a data set of plain text for it"
        )


def _check_tokenizer(config: Config, dataset: TokenDataset) -> None:
    """Refuse the data set that a run has built under another tokenizer than is asked for now."""
    wanted, found = config.data.tokenizer, dataset.manifest.tokenizer.name
    ours = config.data.path is None and (wanted == "bytes" or wanted.startswith("train-bpe:"))
    if ours and wanted != found:
        raise DataError(
            f"data.tokenizer: {dataset.path} was built with {found}, got {wanted}; set it back, "
            f"delete {dataset.path} to have it built again, or choose another run.dir"
        )


def _mask_token(dataset: TokenDataset, source: ModelSource) -> int:
    """Return a token id that the text never has: `[MASK]`, or the model's last if that is free.

    Text is encoded as text, so that the tokenizer's own token for the purpose is never in it.
    """
    tokenizer = dataset.tokenizer()
    for name in _MASK_TOKENS:
        number = tokenizer.token_id(name)
        if number is not None:
            return number
    assert source.vocab_size is not None
    if source.vocab_size <= dataset.vocab_size:
        raise DataError(
            f"masked training needs a token that the text never has: {source.name} has a "
            f"vocabulary of {source.vocab_size}, the data set uses all of {dataset.vocab_size}; "
            f"set vocab_size to {dataset.vocab_size + 1} or more"
        )
    return source.vocab_size - 1


def to_tensors(batch: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return a batch's arrays as tensors over the same memory.

    **Raises:** `DataError` for what is no mapping of arrays, or of types that PyTorch lacks.
    """
    if not isinstance(batch, Mapping):
        raise DataError(
            f"the source's `batch` must return a mapping of names to arrays, it returned a "
            f"{type(batch).__name__}"
        )
    try:
        return {n: torch.from_numpy(np.ascontiguousarray(array)) for n, array in batch.items()}
    except (TypeError, ValueError) as error:
        raise DataError(f"the source gave an array that PyTorch cannot take: {error}") from None


def thread_count(threads: int | None) -> int:
    """Return the CPU threads of an engine: as configured, or every core of this machine."""
    return threads or len(os.sched_getaffinity(0))


def set_threads(threads: int | None) -> None:
    """Use this many CPU threads in PyTorch and in Penstock's kernels; None: every core."""
    import numba

    count = thread_count(threads)
    numba.set_num_threads(min(count, int(numba.config.NUMBA_NUM_THREADS)))  # type: ignore[attr-defined]
    # In this order: Numba starts its threads here, which resets OpenMP's number for PyTorch too,
    # and PyTorch's sums over rows (the gradients of norms) are cut by that number.
    torch.set_num_threads(count)
