"""A model that was recorded in an earlier process: known by its summary, its modules not here yet.

Recording a model of `transformers` imports that library, which takes seconds. A process that needs
shapes, initial weights and programs of the cache needs no module. Whatever does need one records
the model at that moment.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import CompileError, ConfigError
from penstock.models.constructed_origin import ConstructedOrigin
from penstock.models.inputs import TOKENS
from penstock.models.source import ModelSource
from penstock.models.tensor_names import TensorNames

if TYPE_CHECKING:
    from torch import nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    from penstock.models.model_key import ModelKey
    from penstock.models.origin import WeightSource
    from penstock.models.structure import Structure
    from penstock.models.weight_recipe import WeightRecipe
    from penstock.sparsity import PackedIndex

NUMBERS = ("hidden_size", "num_attention_heads")
"""The numbers of a configuration on which plans depend."""

Tensors = Mapping[str, tuple[tuple[int, ...], str, bool]]


@dataclass(frozen=True)
class ModelSummary:
    """What is known of a language model of `transformers` without its modules.

    Attributes:
        name, task, vocab_size, max_sequence_length: as in `ModelSource`.
        class_name: the class of the model.
        input_names: of its inputs, all of them tokens.
        parameters, buffers: shape, type and whether a gradient is required, by first name.
        aliases: further names of tied tensors.
        numbers: of the configuration, those of `NUMBERS` that it has.
        fields: of the configuration, as text.
        embeddings_and_head: names of weights (`embeddings.py`).
    """

    name: str
    task: str
    class_name: str
    input_names: tuple[str, ...]
    vocab_size: int | None
    max_sequence_length: int | None
    parameters: Tensors
    buffers: Tensors
    aliases: Mapping[str, str]
    numbers: Mapping[str, int]
    fields: Mapping[str, str]
    embeddings_and_head: tuple[str, ...]

    @cached_property
    def names(self) -> TensorNames:
        """The tensors by name, on the meta device."""
        parameters, buffers = _meta_tensors(self.parameters), _meta_tensors(self.buffers)
        return TensorNames(parameters, buffers, dict(self.aliases))

    def written(self) -> str:
        """Return the summary as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, text: str | bytes) -> ModelSummary:
        """Return the summary of its written form.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, RuntimeError: it is not a written form.
        """
        have = json.loads(text)
        values = {field.name: have[field.name] for field in fields(cls)}
        for name in ("input_names", "embeddings_and_head"):
            values[name] = tuple(values[name])
        for name in ("parameters", "buffers"):
            values[name] = {
                tensor: (tuple(shape), dtype, requires_grad)
                for tensor, (shape, dtype, requires_grad) in values[name].items()
            }
        summary = cls(**values)
        assert summary.names  # types and shapes that PyTorch does not have are errors here
        return summary


def _tensors_of(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return shape, type and whether a gradient is required of tensors."""
    return {
        name: (tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
        for name, t in tensors.items()
    }


def _meta_tensors(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(
            shape, dtype=getattr(torch, dtype), device="meta", requires_grad=requires_grad
        )
        for name, (shape, dtype, requires_grad) in tensors.items()
    }


class Recording:
    """Records a model when it is first needed, once.

    Args:
        summary: of the model, which the recorded model must have.
        record: records the model.
    """

    def __init__(self, summary: ModelSummary, record: Callable[[], ModelSource]) -> None:
        self._summary, self._record = summary, record
        self._lock = threading.RLock()
        self._recorded: ModelSource | None = None

    @property
    def is_done(self) -> bool:
        """Whether the model has been recorded."""
        return self._recorded is not None

    @property
    def structure(self) -> Structure:
        """The modules."""
        return self._source().structure

    @property
    def origin(self) -> WeightSource:
        """The module of the model, and its weights."""
        return self._source().origin

    def _source(self) -> ModelSource:
        with self._lock:
            if self._recorded is None:
                source = self._record()
                kept = kept_of(source)
                if kept is None or kept[0] != self._summary:
                    raise CompileError(
                        f"{source.name}: transformers builds another model now than when this "
                        "process began, so its code was changed in between; start again"
                    )
                self._recorded = source
            return self._recorded


class RecalledStructure:
    """The structure of a recalled model; see `Structure` for the attributes.

    Only models without a tensor that looks trainable and is no parameter are kept, and only models
    in train mode.
    """

    def __init__(self, summary: ModelSummary, recording: Recording) -> None:
        self._summary, self._recording = summary, recording

    @property
    def is_recorded(self) -> bool:
        """Whether the modules have been needed."""
        return self._recording.is_done

    @property
    def module(self) -> nn.Module:
        """The loss; records the model."""
        return self._recording.structure.module

    @property
    def logits_module(self) -> nn.Module:
        """The logits; records the model."""
        return self._recording.structure.logits_module

    @property
    def evaluation_module(self) -> nn.Module:
        """The loss and the most likely labels; records the model."""
        return self._recording.structure.evaluation_module

    @property
    def original(self) -> nn.Module:
        """The model; records it."""
        return self._recording.structure.original

    @property
    def hf_config(self) -> Any:
        """The configuration; records the model."""
        return self._recording.structure.hf_config

    @property
    def names(self) -> TensorNames:
        """The tensors by name, on the meta device."""
        return self._summary.names

    @property
    def class_name(self) -> str:
        """The class of the model."""
        return self._summary.class_name

    def number(self, name: str) -> int | None:
        """Return a whole number of the configuration; None if it has none of this name."""
        if name not in NUMBERS:
            return self._recording.structure.number(name)
        return self._summary.numbers.get(name)

    def fields(self) -> dict[str, str]:
        """Return the fields of the configuration as text."""
        return dict(self._summary.fields)

    def unregistered_weights(self) -> list[str]:
        """Return nothing: such models are not kept."""
        return []

    def parts_in_eval_mode(self) -> list[str]:
        """Return nothing: such models are not kept."""
        return []

    def embeddings_and_head(self) -> list[str]:
        """Return the weights of embeddings and of the output head."""
        return list(self._summary.embeddings_and_head)


class RecalledOrigin:
    """The weights of a recalled model, made by its recipe; see `WeightSource` for the attributes.

    **Arguments:** `read_recipe` returns the recipe, or None if it cannot be read any more.
    """

    def __init__(
        self,
        summary: ModelSummary,
        read_recipe: Callable[[], WeightRecipe | None],
        recording: Recording,
    ) -> None:
        self.aliases = dict(summary.aliases)
        self.bfloat16 = frozenset[str]()
        self.stored = frozenset[str]()
        self._read_recipe, self._recording = read_recipe, recording

    @property
    def module(self) -> nn.Module:
        """The model; records it."""
        return self._recording.origin.module

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The mode of the model's fake tensors; records it."""
        return self._recording.origin.fake_mode

    @property
    def names(self) -> TensorNames:
        """The tensors of the module by name; records the model."""
        return self._recording.origin.names

    def materialise(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor), as `Deferred` does."""
        return self._maker.materialise(seed, names)

    def mask(self, name: str) -> PackedIndex | None:
        """Return None: a constructor makes no masks."""
        return None

    def draws(self, names: Iterable[str]) -> bool:
        """Return whether the constructor draws random numbers for these tensors."""
        return self._maker.draws(names)

    @cached_property
    def _maker(self) -> WeightRecipe | WeightSource:
        return self._read_recipe() or self._recording.origin


def kept_of(source: ModelSource) -> tuple[ModelSummary, WeightRecipe] | None:
    """Return what a later process needs of a language model instead of its modules.

    Of a model in a folder, this is what the configuration determines, without the folder's values.
    None if it needs more: the code or the module is the user's.
    """
    from penstock.models.deferred import Deferred

    constructor = constructor_of(source)
    if not source.from_library or not isinstance(constructor, Deferred):
        return None
    if source.loss_reduction != "sum" or any(spec != TOKENS for spec in source.inputs.values()):
        return None
    if source.structure.unregistered_weights() or source.structure.parts_in_eval_mode():
        return None
    numbers = {name: source.structure.number(name) for name in NUMBERS}
    names = source.structure.names
    summary = ModelSummary(
        name=source.name,
        task=source.task,
        class_name=source.structure.class_name,
        input_names=tuple(source.inputs),
        vocab_size=source.vocab_size,
        max_sequence_length=source.max_sequence_length,
        parameters=_tensors_of(names.parameters),
        buffers=_tensors_of(names.buffers),
        aliases=dict(source.aliases),
        numbers={name: number for name, number in numbers.items() if number is not None},
        fields=source.structure.fields() or {},
        embeddings_and_head=tuple(source.structure.embeddings_and_head()),
    )
    return summary, constructor.recipe


def constructor_of(source: ModelSource) -> WeightSource:
    """Return the origin of a model without the values of a folder's files."""
    origin = source.origin
    return origin.constructor if isinstance(origin, ConstructedOrigin) else origin


def is_causal_with_new_values(source: ModelSource) -> bool:
    """Whether a model that was not refused with a folder's values is not refused with new ones.

    Values of zero can hide that tokens see later tokens (`causality.py`); another folder of the
    same configuration has other values.
    """
    constructor = constructor_of(source)
    if source.task != "causal_lm" or constructor is source.origin:
        return True
    from penstock.models.causality import refuse_later_tokens

    try:
        refuse_later_tokens(source.logits_module, constructor, source.hf_config)
    except ConfigError:
        return False
    return True


def recalled_model(
    summary: ModelSummary,
    read_recipe: Callable[[], WeightRecipe | None],
    record: Callable[[], ModelSource],
    key: ModelKey,
) -> ModelSource:
    """Return the model of `kept_of` in a process that has not recorded it.

    Args:
        summary: of the model.
        read_recipe: returns the recipe of its weights; None if it cannot be read any more.
        record: records the model, when it is first needed.
        key: of the model.
    """
    recording = Recording(summary, record)
    return ModelSource(
        name=summary.name,
        task=summary.task,
        loss_reduction="sum",
        inputs=dict.fromkeys(summary.input_names, TOKENS),
        targets=("labels",),
        vocab_size=summary.vocab_size,
        max_sequence_length=summary.max_sequence_length,
        structure=RecalledStructure(summary, recording),
        origin=RecalledOrigin(summary, read_recipe, recording),
        from_library=True,
        key=key,
    )
