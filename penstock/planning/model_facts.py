"""What planning asks of a model: a `ModelSource` answers it, and so does a model from the cache.

Recording a model imports transformers and takes seconds. A model that was recorded before is
remembered by its shapes, which is all that planning needs if its programs are in the cache too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from types import SimpleNamespace
from typing import Any, Protocol

from penstock.models import TOKENS, InputSpec


class ModelFacts(Protocol):
    """The part of `ModelSource` on which plans depend."""

    @property
    def name(self) -> str: ...
    @property
    def task(self) -> str: ...
    @property
    def inputs(self) -> Mapping[str, InputSpec]: ...
    @property
    def max_sequence_length(self) -> int | None: ...
    @property
    def hf_config(self) -> Any: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    @property
    def trainable(self) -> Collection[str]: ...
    @property
    def adapter_weights(self) -> Collection[str]: ...
    @property
    def bfloat16(self) -> frozenset[str]: ...
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter, by name, in module order."""
        ...

    def parameter_count(self) -> int:
        """Return the values in all parameters."""
        ...

    def trained_count(self) -> int:
        """Return the values in the parameters that require a gradient."""
        ...

    def buffer_bytes(self) -> int:
        """Return the bytes of all buffers."""
        ...


@dataclass(frozen=True)
class RememberedModel:
    """A language model that was recorded in an earlier process. Its weights are float32.

    Attributes:
        key: of its entry in the cache.
        input_names: its inputs, all of them tokens.
        weights: the shapes of its parameters, by name, in module order.
        buffers: bytes of its buffers.
        configured: the numbers of its configuration on which plans depend.
        resident_bytes: resident memory of that process once the model was recorded: the libraries
            that training loads, and this process does not.
    """

    key: str
    name: str
    task: str
    input_names: tuple[str, ...]
    max_sequence_length: int | None
    weights: Mapping[str, tuple[int, ...]]
    trainable: frozenset[str]
    aliases: Mapping[str, str]
    adapter_weights: frozenset[str]
    buffers: int
    configured: Mapping[str, int]
    resident_bytes: int

    @classmethod
    def of(cls, key: str, model: ModelFacts, resident_bytes: int) -> RememberedModel | None:
        """Return what is remembered of a model; None if it has inputs or weights of other types."""
        if model.bfloat16 or any(spec != TOKENS for spec in model.inputs.values()):
            return None
        numbers = {n: getattr(model.hf_config, n, None) for n in _CONFIGURED}
        return cls(
            key,
            model.name,
            model.task,
            tuple(model.inputs),
            model.max_sequence_length,
            model.shapes(),
            frozenset(model.trainable),
            dict(model.aliases),
            frozenset(model.adapter_weights),
            model.buffer_bytes(),
            {name: number for name, number in numbers.items() if isinstance(number, int)},
            resident_bytes,
        )

    @property
    def inputs(self) -> Mapping[str, InputSpec]:
        """The inputs of a micro-batch."""
        return dict.fromkeys(self.input_names, TOKENS)

    @property
    def hf_config(self) -> Any:
        """The numbers of the configuration on which plans depend."""
        return SimpleNamespace(**self.configured)

    @property
    def bfloat16(self) -> frozenset[str]:
        """No weight is bfloat16."""
        return frozenset()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter, by name, in module order."""
        return dict(self.weights)

    def parameter_count(self) -> int:
        """Return the values in all parameters."""
        return sum(map(math.prod, self.weights.values()))

    def trained_count(self) -> int:
        """Return the values in the parameters that require a gradient."""
        return sum(math.prod(self.weights[name]) for name in self.trainable)

    def buffer_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return self.buffers

    def written(self) -> str:
        """Return the model as JSON."""
        return json.dumps(asdict(self), default=sorted)

    @classmethod
    def read(cls, text: str) -> RememberedModel:
        """Return the model of its written form.

        Raises:
            ValueError, KeyError, TypeError: it is not a written form.
        """
        have = json.loads(text)
        values = {field.name: have[field.name] for field in fields(cls)}
        values["input_names"] = tuple(values["input_names"])
        values["weights"] = {name: tuple(shape) for name, shape in have["weights"].items()}
        values["trainable"] = frozenset(values["trainable"])
        values["adapter_weights"] = frozenset(values["adapter_weights"])
        return cls(**values)


_CONFIGURED = ("hidden_size", "num_attention_heads")
