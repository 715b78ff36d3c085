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

from penstock.config import resolve_preset
from penstock.errors import ConfigError
from penstock.models.adapter import Adapter
from penstock.models.buffers import ModelBuffers
from penstock.models.inputs import TOKENS, Inputs, InputSpec, custom_specs, require_sizes
from penstock.models.longest_sequence import longest_sequence
from penstock.models.model_key import ModelKey
from penstock.models.origin import WeightSource
from penstock.models.reference import load_reference
from penstock.models.structure import RecordedStructure, Structure
from penstock.models.task_losses import WEIGHT_PREFIX, language_model_inputs
from penstock.program import TensorSpec

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from penstock.models.built_model import Built
    from penstock.models.opened_folder import OpenedFolder
    from penstock.models.weight_files import WeightFiles
    from penstock.sparsity import PackedIndex


@dataclass(frozen=True)
class ModelSource:
    """A model that is never built whole.

    Attributes:
        name: display name: a preset's name, a model type, a class.
        task: `causal_lm`, `masked_lm` or `custom`.
        loss_reduction: `sum` over labelled tokens (language models) or `mean` (custom).
        inputs: the specs of all inputs of `module`, in order.
        targets: names of those inputs that `logits_module` does not take.
        weight_prefix: prefix of names in an export of `module`.
        buffer_seed: seed of random values of buffers (`with_buffer_seed`).
        vocab_size, max_sequence_length: for language models; None if unknown.
        structure: the modules, which may be recorded at their first use.
        origin: the module of the user's model, and its weights.
        folder: the Hugging Face folder of the model, with its tokenizer, or None.
        config_file: the content of its `config.json`, as it was read; else empty.
        adapters: adapters by the names of their weights (`with_adapters`).
        from_library: the installed `transformers` has built the model from a configuration; no
            code of the user's took part.
        key: of a model that is remembered between processes, else None.
        notes: messages about the model for the start of a run.
    """

    name: str
    task: str
    loss_reduction: str
    inputs: Mapping[str, InputSpec]
    targets: tuple[str, ...]
    vocab_size: int | None
    max_sequence_length: int | None
    structure: Structure = field(repr=False)
    origin: WeightSource = field(repr=False)
    weight_prefix: str = WEIGHT_PREFIX
    buffer_seed: int = 0
    folder: Path | None = None
    config_file: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    from_library: bool = False
    key: ModelKey | None = None
    notes: tuple[str, ...] = ()
    _files: "WeightFiles | None" = field(default=None, repr=False)
    _built: "Built | None" = field(default=None, repr=False)

    def __repr__(self) -> str:
        inputs = ", ".join(self.inputs)
        return (
            f"<ModelSource {self.name}: {self.task} of {inputs}; {self.parameter_count():,} values>"
        )

    @property
    def module(self) -> nn.Module:
        """The loss, on fake tensors: `module(**example_inputs(...))` is a scalar."""
        return self.structure.module

    @property
    def logits_module(self) -> nn.Module:
        """With the inputs of `module` without labels, the logits (or the result of a custom
        module).

        It shares the tensors of `module`. Code that puts it in eval mode must restore each shared
        module's mode.
        """
        return self.structure.logits_module

    @property
    def evaluation_module(self) -> nn.Module:
        """Of language models the loss and each token's most likely label, else `module`.

        It shares the tensors of `module`, and takes its inputs.
        """
        return self.structure.evaluation_module

    @property
    def original(self) -> nn.Module:
        """The user's own module if it was passed as built, else the module on fake tensors."""
        return self.structure.original

    @property
    def hf_config(self) -> Any:
        """The `transformers` configuration, or None."""
        return self.structure.hf_config

    @property
    def fake_mode(self) -> "FakeTensorMode":
        """The mode of all of the source's fake tensors; further inputs must be created under it."""
        return self.origin.fake_mode

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied tensors, and the listed name of each."""
        return self.origin.aliases

    @property
    def trainable(self) -> frozenset[str]:
        """Names of the parameters that require a gradient."""
        return self.structure.names.trainable

    @property
    def adapter_weights(self) -> frozenset[str]:
        """Names of the weights of all adapters."""
        return frozenset(
            n for adapter in self.adapters.values() for n in (adapter.down, adapter.up)
        )

    @property
    def bfloat16(self) -> frozenset[str]:
        """Names of the parameters that are bfloat16 in the folder or module of origin."""
        return self.origin.bfloat16

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

    def input_specs(self, micro_batch: int, sequence_length: int) -> dict[str, TensorSpec]:
        """Return shape and type of the inputs of `module`, by name, for one micro-batch.

        Raises:
            ConfigError: a size below one, or a sequence longer than the model's maximum.
        """
        require_sizes(self.name, micro_batch, sequence_length, self.max_sequence_length)
        return {
            name: TensorSpec((micro_batch, *spec.sizes(sequence_length)), spec.dtype)
            for name, spec in self.inputs.items()
        }

    def example_inputs(self, micro_batch: int, sequence_length: int) -> dict[str, torch.Tensor]:
        """Return fake inputs of `module`, by name, for one micro-batch.

        **Raises:** as `input_specs`.
        """
        specs = self.input_specs(micro_batch, sequence_length)
        with self.fake_mode:
            return {name: torch.empty(s.shape, dtype=s.dtype) for name, s in specs.items()}

    def initial_weights(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of every parameter, including frozen ones; tied parameters once.

        The values are bit-identical to those of the plain model built after
        `torch.manual_seed(seed)`. For a built module and for a folder of weights, they are its
        values, whatever the seed. From a folder, the order is that of `names`; otherwise it is
        undefined.
        """
        wanted = self.structure.names.parameters if names is None else names
        return self.origin.materialise(seed, wanted)

    def mask(self, name: str) -> "PackedIndex | None":
        """Return the mask of a weight of a packed folder; None for other weights."""
        return self.origin.mask(name)

    @property
    def buffers(self) -> ModelBuffers:
        """The values of buffers, and of tensors that are plain attributes of modules."""
        return ModelBuffers(self.origin, tuple(self.structure.names.buffers), self.buffer_seed)

    def with_buffer_seed(self, seed: int) -> "ModelSource":
        """Return the same model with another seed for its buffers; tensors are shared."""
        return replace(self, buffer_seed=seed)

    def fields(self) -> dict[str, str] | None:
        """Return the fields of the configuration as text, and a hash of the buffers of a folder.

        Processes of a run compare them. None for a model without configuration.
        """
        fields, stored = self.structure.fields(), self.buffers.stored_digest()
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
        return self.structure.names.parameter_count

    def trained_count(self) -> int:
        """Values in the parameters that require a gradient, tied ones counted once."""
        return self.structure.names.trained_count

    def buffer_bytes(self) -> int:
        """Bytes of all buffers, and of tensors that are plain attributes of modules."""
        return self.structure.names.buffer_bytes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, by name, in module order."""
        return self.structure.names.shapes

    def embeddings_and_head(self) -> frozenset[str]:
        """Return the weights of embeddings, output head and adapters (`embeddings.py`)."""
        names = self.structure.embeddings_and_head()
        return frozenset(self.aliases.get(name, name) for name in names) | self.adapter_weights

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
        from penstock.models.lora import adapt

        if self.adapters:
            raise ConfigError(f"{self.name} has adapters already; give lora once")
        wrappers = self.module, self.logits_module, self.evaluation_module
        made = adapt(self.origin, wrappers, rank, alpha, dropout, targets)
        original = self.original if self._built is not None else made.origin.module
        loss, logits, evaluation = made.modules
        structure = RecordedStructure(
            loss, logits, evaluation, original, self.hf_config, made.origin.names
        )
        return replace(
            self, structure=structure, origin=made.origin, adapters=made.adapters, key=None
        )

    @classmethod
    def from_preset(cls, name: str, overrides: Mapping[str, Any] | None = None) -> "ModelSource":
        """A model by preset name, with fields of its configuration replaced.

        Raises:
            ConfigError: unknown preset or field, or inconsistent fields.
        """
        from penstock.models import huggingface_config as library

        resolved = resolve_preset(name, overrides)
        fields = {"model_type": resolved.model_type, **resolved.config}
        config = library.make_config(fields, {})
        origin = library.recorded(config, resolved.task)
        made = _language_model(name, origin, resolved.task, config, is_known=True)
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
        from penstock.models import huggingface_config as library

        made = library.make_config(library.read_config(config), overrides or {})
        task = task or library.find_task(made)
        if task not in ("causal_lm", "masked_lm"):
            raise ConfigError(f"expected task causal_lm or masked_lm, got {task!r}")
        return _of_library(made, task, library.recorded(made, task))

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
        from penstock.models.opened_folder import OpenedFolder

        folder = Path(folder)
        place = folder if weights is None else Path(weights)
        opened = OpenedFolder.with_weights(folder, overrides or {}, ignore, place)
        return cls.from_opened_folder(opened)

    @classmethod
    def from_opened_folder(cls, opened: "OpenedFolder") -> "ModelSource":
        """The model of a folder, or of a run's copy of its small files, whose files are open."""
        made = opened.recorded()
        source = _of_library(made.config, made.task, made.origin)
        return replace(source.in_folder(opened, made.origin), notes=made.notes)

    def in_folder(self, opened: "OpenedFolder", origin: WeightSource) -> "ModelSource":
        """Return the same model in a folder; `origin` has the values of the folder's files."""
        return replace(
            self,
            origin=origin,
            folder=opened.folder,
            config_file=opened.fields,
            _files=opened.files,
        )

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
        from penstock.models.factory import recorded_factory

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
        from penstock.models.bound_functions import refuse_bound_loss
        from penstock.models.built_model import Built

        built = Built(module)
        refuse_bound_loss(module, options.get("loss"))
        source = _from_origin(built, **options)
        assert isinstance(source.structure, RecordedStructure)
        structure = replace(source.structure, original=module)
        return replace(source, structure=structure, notes=built.notes, _built=built)


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
    from penstock.models.huggingface_config import config_of
    from penstock.models.resolved_task import resolved_task

    sizes: dict[str, Any] = {"vocab_size": vocab_size, "max_sequence_length": max_sequence_length}
    name, config = type(origin.module).__name__, config_of(origin.module)
    task = resolved_task(task, config, loss, inputs, targets)
    if task != "custom":
        return _language_model(name, origin, task, config, **sizes)
    if isinstance(loss, str):
        loss = load_reference(loss)
    given, labels = custom_specs(inputs, targets, has_loss=loss is not None)
    structure = RecordedStructure.of_custom_model(origin, loss, labels, config)
    return _source(name, task, origin, structure, {**given, **labels}, tuple(labels), **sizes)


def _of_library(config: Any, task: str, origin: WeightSource) -> ModelSource:
    """The source of a `transformers` model of a configuration."""
    return replace(_language_model(config.model_type, origin, task, config), from_library=True)


def _language_model(
    name: str, origin: WeightSource, task: str, config: Any, is_known: bool = False, **sizes: Any
) -> ModelSource:
    """The source of a model that maps `input_ids` to logits.

    **Raises:** `ConfigError` if tokens of a causal language model see later tokens; those of a
    preset (`is_known`) do not.
    """
    structure = RecordedStructure.of_language_model(origin, task, config)
    if task == "causal_lm" and not is_known:
        from penstock.models.causality import refuse_later_tokens

        refuse_later_tokens(structure.logits_module, origin, config)
    inputs = dict.fromkeys(language_model_inputs(task, hugging_face=config is not None), TOKENS)
    return _source(name, task, origin, structure, inputs, ("labels",), **sizes)


def _source(
    name: str,
    task: str,
    origin: WeightSource,
    structure: RecordedStructure,
    inputs: Mapping[str, InputSpec],
    targets: tuple[str, ...],
    vocab_size: int | None = None,
    max_sequence_length: int | None = None,
) -> ModelSource:
    config = structure.hf_config
    return ModelSource(
        name=name,
        task=task,
        loss_reduction="mean" if task == "custom" else "sum",
        inputs=inputs,
        targets=targets,
        vocab_size=vocab_size or getattr(config, "vocab_size", None),
        max_sequence_length=max_sequence_length or longest_sequence(origin.module, config),
        structure=structure,
        origin=origin,
    )
