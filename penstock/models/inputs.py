"""The inputs of a model: shape and type of each, by name."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

SEQUENCE = "sequence_length"


@dataclass(frozen=True)
class InputSpec:
    """One input of a micro-batch: `shape` without the batch dimension, and the type.

    A dimension may be the word `sequence_length`, which stands for the length that is asked for.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def like(cls, example: torch.Tensor) -> "InputSpec":
        """The spec of an example batch; its first dimension is the batch."""
        return cls(tuple(example.shape[1:]), example.dtype)

    def make(self, micro_batch: int, sequence_length: int) -> torch.Tensor:
        """An empty tensor [micro_batch, *shape]."""
        sizes = [sequence_length if size == SEQUENCE else int(size) for size in self.shape]
        return torch.empty([micro_batch, *sizes], dtype=self.dtype)


TOKENS = InputSpec((SEQUENCE,), torch.int64)
Inputs = Mapping[str, InputSpec | torch.Tensor]


def specs_of(inputs: Inputs) -> dict[str, InputSpec]:
    """Return the specs of inputs, of which some may be given by an example batch."""
    return {
        name: InputSpec.like(value) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }
