"""The origin of a weight in a Hugging Face folder: one tensor, or several that are converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers.core_model_loading import WeightConverter

_SHOWN = 5
# Operations of `transformers` on tensors that compute no value.
_MOVES = {
    "Chunk",
    "Concatenate",
    "Interleave",
    "MergeModulelist",
    "PermuteForRope",
    "Split",
    "SplitModulelist",
    "Transpose",
}


@dataclass(frozen=True)
class Direct:
    """A weight that equals one tensor of the folder; `also` are copies under further names."""

    tensor: str
    also: tuple[str, ...] = ()
    keeps_values = True

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors of the folder that contain its values."""
        return (self.tensor,)


@dataclass(frozen=True, eq=False)
class Converted:
    """Weights that are derived from tensors of the folder: split, merged or transposed."""

    converter: WeightConverter
    first: str
    parts: tuple[tuple[str, str], ...]
    targets: tuple[str, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors of the folder that contain its values."""
        return tuple(tensor for _, tensor in self.parts)

    @property
    def keeps_values(self) -> bool:
        """Whether its values are only moved and none is computed."""
        return all(type(step).__name__ in _MOVES for step in self.converter.operations)

    def convert(
        self,
        read: Callable[[str], torch.Tensor],
        module: nn.Module,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> dict[str, torch.Tensor]:
        """Return the weights by name; `read` returns a tensor of the folder by name."""
        converter: Any = deepcopy(self.converter)
        for pattern, tensor in self.parts:
            converter.add_tensor(self.first, tensor, pattern, lambda tensor=tensor: read(tensor))
        sources = ", ".join(tensor for _, tensor in self.parts[:_SHOWN])
        try:
            made = converter.convert(self.first, model=module, config=module.config)
        except Exception as error:  # operations of transformers raise many error classes
            raise ConfigError(
                f"{self.first} cannot be made of {sources}: {type(error).__name__}: {error}"
            ) from error
        found = {n: t[0] if isinstance(t, list) else t for n, t in made.items()}
        for name in self.targets:
            shape = tuple(found[name].shape) if name in found else None
            if shape != shapes[name]:
                raise ConfigError(
                    f"{name} is {list(shapes[name])} in the model, {sources} give "
                    f"{'nothing of that name' if shape is None else list(shape)}; config.json and "
                    "weights are of different models"
                )
        return found


Origin = Direct | Converted


def written_origins(origins: Mapping[str, Origin]) -> dict[str, list[str]] | None:
    """Return origins in a form for JSON; None if a weight is converted."""
    written = {}
    for name, origin in origins.items():
        if not isinstance(origin, Direct):
            return None
        written[name] = [origin.tensor, *origin.also]
    return written


def read_origins(written: Mapping[str, list[str]]) -> dict[str, Origin]:
    """Return the origins of their written form."""
    return {name: Direct(tensor, tuple(also)) for name, (tensor, *also) in written.items()}
