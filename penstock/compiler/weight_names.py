"""The names of a module's parameters, and which of them a compilation trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from penstock.compiler.options import CompileOptions
from penstock.compiler.selection import select_trainable


@dataclass(frozen=True)
class WeightNames:
    """The names of a module's parameters in the user's module; tied parameters occur once.

    `first` maps every name in an export to the weight's first name. `aliases` maps each weight to
    its further names. `differentiable` are the weights whose `requires_grad` the model has set.
    """

    first: Mapping[str, str]
    aliases: Mapping[str, Sequence[str]]
    differentiable: frozenset[str]

    @classmethod
    def of(cls, module: nn.Module, prefix: str) -> WeightNames:
        """Collect the names of `module`; its own names begin with `prefix`."""
        known: dict[int, str] = {}
        first: dict[str, str] = {}
        aliases: dict[str, list[str]] = {}
        differentiable = set()
        for full, parameter in module.named_parameters(remove_duplicate=False):
            name = full.removeprefix(prefix)
            if id(parameter) in known:
                aliases[known[id(parameter)]].append(name)
            else:
                aliases[known.setdefault(id(parameter), name)] = []
            first[full] = known[id(parameter)]
            if parameter.requires_grad:
                differentiable.add(name)
        return cls(first, aliases, frozenset(differentiable))

    def trainable(self, options: CompileOptions) -> frozenset[str]:
        """Return the weights that `options` select for training."""
        return select_trainable(
            self.aliases,
            self.differentiable,
            train=options.train,
            freeze=options.freeze,
            adapters=options.adapters,
        )
