"""Checks whether the inputs and the loss of a module that was passed to the trainer are known."""

import inspect

from torch import nn

from penstock.errors import ConfigError, few
from penstock.models.huggingface_config import find_task

_EXAMPLE = ("input_ids", "labels")


def require_clear(module: nn.Module) -> None:
    """Reject a module whose inputs and loss are unknown.

    They are known for a language model of `transformers`, and for a module whose forward takes
    `input_ids` and `labels` and returns its loss.

    Raises:
        ConfigError: names `ModelSource.from_module` and its required arguments.
    """
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        try:
            find_task(module.config)
            return
        except ConfigError:
            pass  # no language model: its own message would be about configurations
    signature = inspect.signature(module.forward)
    if not isinstance(module, PreTrainedModel):
        try:
            signature.bind(**dict.fromkeys(_EXAMPLE))
            return
        except TypeError:
            pass
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [p for p in signature.parameters.values() if p.kind in kinds]
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    inputs = needed or [p.name for p in parameters[:1]] or ["x"]
    name = type(module).__name__
    takes = few([p.name for p in parameters]) or "nothing by name"
    examples = ", ".join(f'"{each}": {each}' for each in inputs)
    raise ConfigError(
        "Trainer(model=...): expected a language model of transformers, or a module whose forward "
        f"takes input_ids and labels and returns its loss; {name}.forward takes {takes}. Describe "
        "its inputs and its loss: model=ModelSource.from_module(model, loss=loss, "
        f'inputs={{{examples}}}, targets={{"target": target}}), with loss(output, target) and an '
        "example batch of each, and source=ArraySource(...) with arrays of the same names"
    )
