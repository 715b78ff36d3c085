"""The source of a model: its structure for capture, and its weights one at a time.

A `ModelSource` never holds a model with allocated memory. `module` is on fake tensors and can be
exported. `initial_weights` yields the weights one after the other, so GPT-3 175B can be described
on a laptop. All public names are those of the `state_dict()` of the user's model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.config import resolve_preset
from penstock.errors import ConfigError, did_you_mean
from penstock.models.bound_functions import refuse_bound_loss
from penstock.models.buffers import ModelBuffers
from penstock.models.built_model import Built
from penstock.models.causality import refuse_later_tokens
from penstock.models.factory import recorded_factory
from penstock.models.huggingface_config import (
    config_of,
    find_task,
    make_config,
    read_config,
    recorded,
    refuse_unreadable,
)
from penstock.models.inputs import SEQUENCE, TOKENS, Inputs, InputSpec, custom_specs
from penstock.models.longest_sequence import longest_sequence
from penstock.models.lora import Adapter, adapt
from penstock.models.modes import put_in_train_mode
from penstock.models.origin import WeightSource
from penstock.models.pretrained import Pretrained
from penstock.models.reference import load_reference
from penstock.models.resolved_configuration import configuration_fields
from penstock.models.stored_buffers import with_stored_buffers
from penstock.models.task_losses import (
    LANGUAGE_MODEL_LOSSES,
    TASKS,
    WEIGHT_PREFIX,
    CustomLoss,
    Logits,
    Outputs,
    Scores,
)
from penstock.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex


@dataclass(frozen=True)
class ModelSource:
    """A model that is never built whole.

    Attributes:
        name: display name: a preset's name, a model type, a class.
        task: `causal_lm`, `masked_lm` or `custom`.
        module: on fake tensors; `module(**example_inputs(...))` is the scalar loss.
        logits_module: shares `module`'s tensors; with the same inputs without labels it returns
            logits (or the result of a custom module). Code that puts it in eval mode must restore
            each shared module's mode.
        evaluation_module: shares `module`'s tensors and takes its inputs; of language models it
            returns the loss and each token's most likely label, else it is `module`.
        loss_reduction: `sum` over labelled tokens (language models) or `mean` (custom).
        inputs: the specs of all inputs of `module`, in order.
        targets: names of those inputs that `logits_module` does not take.
        weight_prefix: prefix of names in an export of `module`.
        buffer_seed: seed of random values of buffers (`with_buffer_seed`).
        vocab_size, max_sequence_length: for language models; None if unknown.
        hf_config: the `transformers` configuration, or None.
        folder: the Hugging Face folder of the model, with its tokenizer, or None.
        config_file: the content of its `config.json`, as it was read; else empty.
        adapters: adapters by the names of their weights (`with_adapters`).
        from_library: the installed `transformers` has built the model from a configuration; no
            code of the user's took part.
        notes: messages about the model for the start of a run.
    """

    name: str
    task: str
    module: nn.Module
    logits_module: nn.Module
    evaluation_module: nn.Module
    loss_reduction: str
    inputs: Mapping[str, InputSpec]
    targets: tuple[str, ...]
    vocab_size: int | None
    max_sequence_length: int | None
    hf_config: Any
    _origin: WeightSource = field(repr=False)
    weight_prefix: str = WEIGHT_PREFIX
    buffer_seed: int = 0
    folder: Path | None = None
    config_file: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    from_library: bool = False
    notes: tuple[str, ...] = ()
    _files: WeightFiles | None = field(default=None, repr=False)
    _built: Built | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        inputs = ", ".join(self.inputs)
        return (
            f"<ModelSource {self.name}: {self.task} of {inputs}; {self.parameter_count():,} values>"
        )

    @property
    def class_name(self) -> str:
        """The class of the user's model."""
        return type(self._origin.module).__name__

    @property
    def original(self) -> nn.Module:
        """The user's own module if it was passed as built, else the module on fake tensors."""
        return self._built.original if self._built is not None else self._origin.module

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The mode of all of the source's fake tensors; further inputs must be created under it."""
        return self._origin.fake_mode

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied tensors, and the listed name of each."""
        return self._origin.aliases

    @property
    def trainable(self) -> frozenset[str]:
        """Names of the parameters that require a gradient."""
        parameters = self._origin.names.parameters
        return frozenset(name for name, tensor in parameters.items() if tensor.requires_grad)

    @property
    def adapter_weights(self) -> frozenset[str]:
        """Names of the weights of all adapters."""
        return frozenset(
            n for adapter in self.adapters.values() for n in (adapter.down, adapter.up)
        )

    @property
    def bfloat16(self) -> frozenset[str]:
        """Names of the parameters that are bfloat16 in the folder or module of origin."""
        return self._origin.bfloat16

    @property
    def weights_folder(self) -> Path | None:
        """The folder from which the weights are read, if any."""
        return self._files.folder if self._files else None

    @property
    def folder_weights(self) -> frozenset[str]:
        """Names of the parameters that can be read again from the folder."""
        return frozenset(self.shapes()) - self.adapter_weights if self._files else frozenset()

    def public_name(self, exported: str) -> str:
        """Return the name in the user's model of a tensor or module path in an export of
        `module`."""
        name = exported.removeprefix(self.weight_prefix)
        return self.aliases.get(name, name)

    def example_inputs(self, micro_batch: int, sequence_length: int) -> dict[str, torch.Tensor]:
        """Fake inputs of `module`, by name, for one micro-batch.

        Raises:
            ConfigError: a size below one, or a sequence longer than the model's maximum.
        """
        for name, value in (("micro_batch", micro_batch), (SEQUENCE, sequence_length)):
            if value < 1:
                raise ConfigError(f"expected {name} of at least 1, got {value}")
        limit = self.max_sequence_length
        if limit is not None and sequence_length > limit:
            raise ConfigError(
                f"{self.name} takes sequences of at most {limit} tokens, sequence_length is "
                f"{sequence_length}; lower it, or raise the model's number of positions"
            )
        with self.fake_mode:
            return {
                name: spec.make(micro_batch, sequence_length) for name, spec in self.inputs.items()
            }

    def initial_weights(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every parameter, including frozen ones; tied parameters once.

        The values are bit-identical to those of the plain model built after
        `torch.manual_seed(seed)`. For a built module and for a folder of weights, they are its
        values, whatever the seed. From a folder, the order is that of `names`; otherwise it is
        undefined.
        """
        wanted = self._origin.names.parameters if names is None else names
        return self._origin.materialise(seed, wanted)

    def mask(self, name: str) -> "PackedIndex | None":
        """Return the mask of a weight of a packed folder; None for other weights."""
        return self._origin.mask(name)

    @property
    def buffers(self) -> ModelBuffers:
        """The values of buffers, and of tensors that are plain attributes of modules."""
        return ModelBuffers(self._origin, self.buffer_seed)

    def with_buffer_seed(self, seed: int) -> "ModelSource":
        """Return the same model with another seed for its buffers; tensors are shared."""
        return replace(self, buffer_seed=seed)

    def fields(self) -> dict[str, str] | None:
        """Return the fields of the configuration as text, and a hash of the buffers of a folder.

        Processes of a run compare them. None for a model without configuration.
        """
        fields, stored = configuration_fields(self.hf_config), self.buffers.stored_digest()
        return fields if fields is None or stored is None else {**fields, "buffers": stored}

    def weights_fingerprint(self) -> str | None:
        """Return a fingerprint of a folder of weights; None for other models."""
        return self._files.fingerprint() if self._files is not None else None

    def values_fingerprint(self) -> str | None:
        """Return a hash of the values of a built module; None for other models.

        The whole module is read.
        """
        return self._built.fingerprint() if self._built is not None else None

    def parameter_count(self) -> int:
        """Values in all parameters, tied ones counted once."""
        return sum(tensor.numel() for tensor in self._origin.names.parameters.values())

    def trained_count(self) -> int:
        """Values in the parameters that require a gradient, tied ones counted once."""
        tensors = self._origin.names.parameters.values()
        return sum(tensor.numel() for tensor in tensors if tensor.requires_grad)

    def buffer_bytes(self) -> int:
        """Bytes of all buffers, and of tensors that are plain attributes of modules."""
        return sum(tensor.nbytes for tensor in self._origin.names.buffers.values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, by name, in module order."""
        return {name: tuple(t.shape) for name, t in self._origin.names.parameters.items()}

    def with_adapters(
        self, *, rank: int, alpha: float, targets: Sequence[str], dropout: float = 0.0
    ) -> "ModelSource":
        """Return the same model with a low-rank adapter for every weight that `targets` matches.

        This source is unchanged; both sources share their tensors.

        Args:
            rank: rank of the adapters, 1 or more.
            alpha: an adapter's output is multiplied by `alpha / rank`.
            targets: patterns of names of weights of `nn.Linear` or GPT-2's `Conv1D`.
            dropout: share of an adapter's inputs that training drops.

        Raises:
            ConfigError: a pattern that matches nothing, or a weight that can have no adapter.
            CompileError: the model's modules cannot be copied.
        """
        if self.adapters:
            raise ConfigError(f"{self.name} has adapters already; give lora once")
        wrappers = self.module, self.logits_module, self.evaluation_module
        made = adapt(self._origin, wrappers, rank, alpha, dropout, targets)
        module, logits_module, evaluation_module = made.modules
        return replace(
            self,
            module=module,
            logits_module=logits_module,
            evaluation_module=evaluation_module,
            _origin=made.origin,
            adapters=made.adapters,
        )

    @classmethod
    def from_preset(cls, name: str, overrides: Mapping[str, Any] | None = None) -> "ModelSource":
        """A model by preset name, with fields of its configuration replaced.

        Raises:
            ConfigError: unknown preset or field, or inconsistent fields.
        """
        resolved = resolve_preset(name, overrides)
        fields = {"model_type": resolved.model_type, **resolved.config}
        config = make_config(fields, {})
        origin = recorded(config, resolved.task)
        made = _language_model(name, origin, resolved.task, config)
        return replace(made, from_library=True)

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any] | str | Path,
        overrides: Mapping[str, Any] | None = None,
        task: str | None = None,
    ) -> "ModelSource":
        """A `transformers` model with fresh weights.

        Args:
            config: a dict with `model_type`, a `config.json`, or the folder of one.
            overrides: fields of the configuration to replace.
            task: `causal_lm` or `masked_lm`; by default the task of the configuration.

        Raises:
            ConfigError: unreadable, an unknown model type or field, or no such model for the task.
        """
        made = make_config(read_config(config), overrides or {})
        task = task or find_task(made)
        if task not in ("causal_lm", "masked_lm"):
            raise ConfigError(f"expected task causal_lm or masked_lm, got {task!r}")
        return _from_library(made, task, recorded(made, task))

    @classmethod
    def from_hf(
        cls,
        folder: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        ignore: Sequence[str] = (),
        weights: str | Path | None = None,
    ) -> "ModelSource":
        """A `transformers` model with the weights of a local Hugging Face folder.

        `initial_weights` reads them one at a time, and yields float32.

        Args:
            folder: with `config.json` and safetensors, single or sharded.
            overrides: fields of the configuration to replace, such as a dropout.
            ignore: patterns of tensors in the folder that the model may leave unused.
            weights: the folder of the safetensors, if different.

        Raises:
            ConfigError: no such folder, no safetensors in it, or weights of another model.
            CorruptionError: a file violates its format.
        """
        folder = Path(folder)
        refuse_unreadable(folder)
        fields = read_config(folder)
        files = WeightFiles(folder if weights is None else Path(weights))
        made = make_config(fields, overrides or {}, tensors=len(files.tensors))
        task = find_task(made)
        origin = Pretrained(recorded(made, task), files, ignore)
        source = _from_library(made, task, origin)
        return replace(source, folder=folder, config_file=fields, notes=origin.notes, _files=files)

    @classmethod
    def without_weights(
        cls, folder: Path, overrides: Mapping[str, Any] | None = None
    ) -> "ModelSource":
        """The model of `from_hf` from a run's copy of the folder's small files and buffers.

        For a run that already has weights: its initial weights are random.
        """
        fields = read_config(folder)
        made = make_config(fields, overrides or {})
        task = find_task(made)
        origin = with_stored_buffers(recorded(made, task), folder)
        return replace(_from_library(made, task, origin), folder=folder, config_file=fields)

    @classmethod
    def from_factory(
        cls, reference: str, args: Mapping[str, Any] | None = None, **options: Any
    ) -> "ModelSource":
        """A user's model by the function that builds it; `options` as in `from_module`.

        Args:
            reference: `package.module:function`, importable from here or the current folder.
            args: keyword arguments of the function.

        Raises:
            ConfigError: no such module or function, or unknown arguments.
            CompileError: the function fails or cannot be replayed.
        """
        return _from_origin(recorded_factory(reference, args or {}), **options)

    @classmethod
    def from_module(cls, module: nn.Module, **options: Any) -> "ModelSource":
        """A model that is already built; its values are the initial weights.

        The module is neither changed nor copied: its own tensors are returned as weights.

        Args:
            module: on the CPU. In a model in train mode, parts in eval mode keep their mode; a
                model in eval mode is put completely into train mode.
            options: those below, by name.

        Options:

        - `task`: `causal_lm`, `masked_lm` (forward takes `input_ids` and returns logits) or
          `custom`; by default `custom`, unless it is a `transformers` language model.
        - `loss`, for custom: a function `loss(output, **targets)` or its `package.module:function`;
          by default the module returns its scalar mean loss.
        - `inputs`, for custom: the inputs of `forward`, by name, as `InputSpec`s or example
          batches; by default `input_ids`, and `labels` too if there is no `loss`.
        - `targets`, for custom: the same for the targets of `loss`; by default `labels`.
        - `vocab_size`, `max_sequence_length`: for a module without a configuration that has them.

        Raises:
            ConfigError, CompileError: a name that does not exist, or a module that cannot be used.
        """
        built = Built(module)
        refuse_bound_loss(module, options.get("loss"))
        return replace(_from_origin(built, **options), notes=built.notes, _built=built)


def _language_model(
    name: str,
    origin: WeightSource,
    task: str,
    config: Any,
    vocab_size: int | None = None,
    max_sequence_length: int | None = None,
) -> ModelSource:
    """The source of a model that maps `input_ids` to logits."""
    put_in_train_mode(origin.module)
    causal = task == "causal_lm"
    hugging_face = config is not None
    options: dict[str, Any] = {"use_cache": False} if hugging_face and causal else {}
    inputs = {"input_ids": TOKENS, "labels": TOKENS}
    if hugging_face and not causal:
        inputs = {"input_ids": TOKENS, "attention_mask": TOKENS, "labels": TOKENS}
    return ModelSource(
        name=name,
        task=task,
        module=LANGUAGE_MODEL_LOSSES[task](
            origin.module, hugging_face=hugging_face, options=options
        ),
        logits_module=Logits(origin.module, hugging_face=hugging_face, options=options),
        evaluation_module=Scores(origin.module, hugging_face=hugging_face, options=options),
        loss_reduction="sum",
        inputs=inputs,
        targets=("labels",),
        vocab_size=vocab_size or getattr(config, "vocab_size", None),
        max_sequence_length=max_sequence_length or longest_sequence(origin.module, config),
        hf_config=config,
        _origin=origin,
    )


def _from_library(config: Any, task: str, origin: WeightSource) -> ModelSource:
    """The source of a `transformers` model of a configuration."""
    source = _language_model(config.model_type, origin, task, config)
    _refuse_later_tokens(source)
    return replace(source, from_library=True)


def _refuse_later_tokens(source: ModelSource) -> None:
    if source.task == "causal_lm":
        refuse_later_tokens(source.logits_module, source._origin, source.hf_config)


def _from_origin(
    origin: WeightSource,
    *,
    task: str | None = None,
    loss: str | Callable[..., torch.Tensor] | None = None,
    inputs: Inputs | None = None,
    targets: Inputs | None = None,
    vocab_size: int | None = None,
    max_sequence_length: int | None = None,
) -> ModelSource:
    """The source of a user's module; the arguments are those of `ModelSource.from_module`."""
    module = origin.module
    name = type(module).__name__
    config = config_of(module)
    if task is None:
        own = loss is None and inputs is None and config is not None
        task = find_task(config) if own else "custom"
    if task not in TASKS:
        raise ConfigError(
            f"expected task {', '.join(TASKS)}, got {task!r}{did_you_mean(task, TASKS)}"
        )
    if task != "custom":
        if loss is not None or inputs is not None or targets is not None:
            raise ConfigError(f"loss, inputs and targets go with task: custom, not with {task}")
        source = _language_model(name, origin, task, config, vocab_size, max_sequence_length)
        _refuse_later_tokens(source)
        return source
    if isinstance(loss, str):
        loss = load_reference(loss)
    given, labels = custom_specs(inputs, targets, has_loss=loss is not None)
    put_in_train_mode(module)
    objective = CustomLoss(module, loss, labels)
    return ModelSource(
        name=name,
        task=task,
        module=objective,
        logits_module=Outputs(module),
        evaluation_module=objective,
        loss_reduction="mean",
        inputs={**given, **labels},
        targets=tuple(labels),
        vocab_size=vocab_size or getattr(config, "vocab_size", None),
        max_sequence_length=max_sequence_length or longest_sequence(module, config),
        hf_config=config,
        _origin=origin,
    )
