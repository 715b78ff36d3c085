"""The inputs of a model: shape and type of each input of a micro-batch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock.errors import ConfigError

SEQUENCE = "sequence_length"


@dataclass(frozen=True)
class InputSpec:
    """One input of a micro-batch: its type, and `shape` without the batch dimension.

    A dimension may be the word `sequence_length`, which stands for the requested length.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def like(cls, example: torch.Tensor) -> "InputSpec":
        """The spec of an example batch; its first dimension is the batch."""
        return cls(tuple(example.shape[1:]), example.dtype)

    def sizes(self, sequence_length: int) -> list[int]:
        """The shape of a row, with the requested sequence length."""
        return [sequence_length if size == SEQUENCE else int(size) for size in self.shape]

    def bytes(self, sequence_length: int) -> int:
        """The bytes of a row."""
        return math.prod(self.sizes(sequence_length)) * self.dtype.itemsize


def require_sizes(name: str, micro_batch: int, sequence_length: int, longest: int | None) -> None:
    """Refuse a micro-batch that a model does not take.

    Args:
        name: of the model.
        longest: the most tokens of a sequence; None for no limit.

    Raises:
        ConfigError: a size below one, or a sequence longer than the model's maximum.
    """
    for what, value in (("micro_batch", micro_batch), (SEQUENCE, sequence_length)):
        if value < 1:
            raise ConfigError(f"expected {what} of at least 1, got {value}")
    if longest is not None and sequence_length > longest:
        raise ConfigError(
            f"{name} takes sequences of at most {longest} tokens, sequence_length is "
            f"{sequence_length}; lower it, or raise the model's number of positions"
        )


TOKENS = InputSpec((SEQUENCE,), torch.int64)
Inputs = Mapping[str, InputSpec | torch.Tensor]


def specs_of(inputs: Inputs) -> dict[str, InputSpec]:
    """Return the specs of inputs, some of which may be example batches."""
    return {
        name: InputSpec.like(value) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }


def custom_specs(
    inputs: Inputs | None, targets: Inputs | None, *, has_loss: bool
) -> tuple[dict[str, InputSpec], dict[str, InputSpec]]:
    """Return the specs of a custom model's inputs, and of the targets of its loss.

    Without a loss function, the targets are inputs too.

    Raises:
        ConfigError: a name is both an input and a target.
    """
    given = specs_of(inputs) if inputs is not None else {"input_ids": TOKENS}
    if targets is not None:
        labels = specs_of(targets)
    else:
        labels = {"labels": TOKENS} if inputs is None else {}
    if not has_loss:
        given, labels = {**given, **labels}, {}
    if both := given.keys() & labels.keys():
        raise ConfigError(f"{', '.join(sorted(both))} cannot be both an input and a target")
    return given, labels
