"""The names of the tensors of a module."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class TensorNames:
    """The tensors of a module by name; a tensor with several names is listed under its first name.

    `parameters` and `buffers` map names to tensors in module order; `buffers` also holds tensors
    that are plain attributes of a module. `aliases` maps every further name to the first one.
    """

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    aliases: dict[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> "TensorNames":
        """Collect the names of all tensors of `module`."""
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}

        def distinct(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            found = {}
            for name, tensor in named:
                if first.setdefault(id(tensor), name) == name:
                    found[name] = tensor
                else:
                    aliases[name] = first[id(tensor)]
            return found

        attributes = [
            (f"{path}.{name}" if path else name, value)
            for path, owner in module.named_modules()
            for name, value in vars(owner).items()
            if isinstance(value, torch.Tensor)
        ]
        parameters = distinct(module.named_parameters(remove_duplicate=False))
        buffers = distinct([*module.named_buffers(remove_duplicate=False), *attributes])
        return cls(parameters, buffers, aliases)

    @property
    def parameter_count(self) -> int:
        """Values in all parameters."""
        return sum(tensor.numel() for tensor in self.parameters.values())

    @property
    def trainable(self) -> frozenset[str]:
        """Names of the parameters that require a gradient."""
        return frozenset(name for name, t in self.parameters.items() if t.requires_grad)

    @property
    def trained_count(self) -> int:
        """Values in the parameters that require a gradient."""
        return sum(t.numel() for t in self.parameters.values() if t.requires_grad)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(tensor.nbytes for tensor in self.buffers.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, by name, in module order."""
        return {name: tuple(tensor.shape) for name, tensor in self.parameters.items()}
