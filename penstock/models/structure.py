"""The modules of a model, and what can be said of them.

The modules of a `RecordedStructure` are in this process. Those of a `RecalledStructure`
(`recalled.py`) were recorded in an earlier process, and are recorded again when they are first
used: what its `ModelSummary` answers needs no module.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from penstock.models.embeddings import embeddings_and_head
from penstock.models.modes import parts_in_eval_mode, put_in_train_mode
from penstock.models.origin import WeightSource
from penstock.models.resolved_configuration import configuration_fields
from penstock.models.task_losses import (
    LANGUAGE_MODEL_LOSSES,
    CustomLoss,
    Logits,
    Outputs,
    Scores,
)
from penstock.models.tensor_names import TensorNames
from penstock.models.unregistered import unregistered_weights


class Structure(Protocol):
    """See `ModelSource` for the modules and for `hf_config`.

    Attributes:
        names: the tensors by name, for their shapes and types: the tensors of the modules may be
            other ones.
        is_recorded: whether the modules are in this process; else their first use records them.
        original: the user's own module if it was passed as built, else the model on fake tensors.
        class_name: the class of the user's model.
    """

    @property
    def is_recorded(self) -> bool: ...
    @property
    def module(self) -> nn.Module: ...
    @property
    def logits_module(self) -> nn.Module: ...
    @property
    def evaluation_module(self) -> nn.Module: ...
    @property
    def original(self) -> nn.Module: ...
    @property
    def hf_config(self) -> Any: ...
    @property
    def names(self) -> TensorNames: ...
    @property
    def class_name(self) -> str: ...

    def number(self, name: str) -> int | None:
        """Return a whole number of the configuration; None if it has none of this name."""
        ...

    def fields(self) -> dict[str, str] | None:
        """Return the fields of the configuration as text (`configuration_fields`)."""
        ...

    def unregistered_weights(self) -> list[str]:
        """Return the tensors that look trainable but are no parameters (`unregistered.py`)."""
        ...

    def parts_in_eval_mode(self) -> list[str]:
        """Return the paths, in `module`, of the outermost modules in eval mode."""
        ...

    def embeddings_and_head(self) -> list[str]:
        """Return the weights of embeddings and of the output head (`embeddings.py`)."""
        ...


@dataclass(frozen=True)
class RecordedStructure:
    """The modules of a model in this process; see `Structure` for the attributes."""

    module: nn.Module
    logits_module: nn.Module
    evaluation_module: nn.Module
    original: nn.Module
    hf_config: Any
    names: TensorNames

    @classmethod
    def of_language_model(cls, origin: WeightSource, task: str, config: Any) -> "RecordedStructure":
        """Return the structure of a model that maps `input_ids` to logits."""
        model = put_in_train_mode(origin.module)
        is_causal, of_library = task == "causal_lm", config is not None
        options = {"use_cache": False} if of_library and is_causal else {}
        loss, logits, scores = (
            wrap(model, hugging_face=of_library, options=options)
            for wrap in (LANGUAGE_MODEL_LOSSES[task], Logits, Scores)
        )
        return cls(loss, logits, scores, model, config, origin.names)

    @classmethod
    def of_custom_model(
        cls,
        origin: WeightSource,
        loss: Callable[..., torch.Tensor] | None,
        labels: Iterable[str],
        config: Any,
    ) -> "RecordedStructure":
        """Return the structure of a model with the user's own loss, or that returns its loss."""
        model = put_in_train_mode(origin.module)
        objective = CustomLoss(model, loss, labels)
        return cls(objective, Outputs(model), objective, model, config, origin.names)

    @property
    def is_recorded(self) -> bool:
        """True: the modules are here."""
        return True

    @property
    def class_name(self) -> str:
        """The class of the user's model."""
        return type(self.original).__name__

    def number(self, name: str) -> int | None:
        """Return a whole number of the configuration; None if it has none of this name."""
        value = getattr(self.hf_config, name, None)
        return value if isinstance(value, int) else None

    def fields(self) -> dict[str, str] | None:
        """Return the fields of the configuration as text."""
        return configuration_fields(self.hf_config)

    def unregistered_weights(self) -> list[str]:
        """Return the tensors that look trainable but are no parameters."""
        return unregistered_weights(self.original)

    def parts_in_eval_mode(self) -> list[str]:
        """Return the paths, in `module`, of the outermost modules in eval mode."""
        return parts_in_eval_mode(self.module)

    def embeddings_and_head(self) -> list[str]:
        """Return the weights of embeddings and of the output head."""
        return embeddings_and_head(self.original)
