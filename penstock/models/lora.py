"""Low-rank adapters: derives a model source in which each selected layer has an adapter.

A layer y = base(x) becomes y = base(x) + (alpha / rank) (x A^T) B^T. A [rank, in] is drawn from the
seed, B [out, rank] starts at zero, so the first step equals that of the base model. The base's
weights keep their names and initial values; they are frozen unless `train` names them.

Source of the method: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021; initial
values and names as in the PEFT library.
"""

import copy
import hashlib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from penstock.errors import CompileError, ConfigError
from penstock.models.adapter import Adapter
from penstock.models.origin import WeightSource
from penstock.models.tensor_names import TensorNames
from penstock.name_patterns import matching

if TYPE_CHECKING:
    from penstock.sparsity import PackedIndex


class _AdaptedLayer(nn.Module):
    """Mixin that precedes a layer's class: its `forward` adds the adapter's output."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_scale: float
    lora_dropout: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        seen = F.dropout(x, self.lora_dropout, self.training) if self.lora_dropout else x
        return super().forward(x) + self.lora_B(self.lora_A(seen) * self.lora_scale)


@dataclass(frozen=True)
class AdaptedModel:
    """The result of `adapt`: wrappers of a model with adapters, its tensors, and the adapters."""

    modules: tuple[Any, ...]
    origin: "AdaptedOrigin"
    adapters: dict[str, Adapter]


def adapt(
    origin: WeightSource,
    wrappers: Sequence[nn.Module],
    rank: int,
    alpha: float,
    dropout: float,
    targets: Sequence[str],
) -> AdaptedModel:
    """Add an adapter to every weight that `targets` matches; see `ModelSource.with_adapters`.

    `wrappers` contain the origin's module as `model`; they are copied, over the same tensors.
    """
    names = _targeted(origin.module, origin.names, targets)
    copies = _copied(origin, wrappers)
    model = copies[0].model
    adapters = {}
    for name in names:
        prefix = name.removesuffix("weight")  # empty if the model is a single layer
        layer = model.get_submodule(prefix.removesuffix("."))
        down, up = f"{prefix}lora_A.weight", f"{prefix}lora_B.weight"
        adapters[name] = Adapter(down, up, rank, alpha, dropout, isinstance(layer, Conv1D))
        with origin.fake_mode:
            _add(adapters[name], layer)
    return AdaptedModel(copies, AdaptedOrigin(origin, model, adapters.values()), adapters)


def _targeted(module: nn.Module, names: TensorNames, targets: Sequence[str]) -> list[str]:
    """Return the names of the weights that get an adapter, in module order."""
    able = [
        f"{path}.weight" if path else "weight"
        for path, child in module.named_modules()
        if isinstance(child, nn.Linear | Conv1D)
    ]
    tied = {**names.aliases, **{first: other for other, first in names.aliases.items()}}
    everything = [*names.parameters, *names.aliases]
    chosen: set[str] = set()
    for pattern in targets:
        for name in sorted(matching("lora.targets", [pattern], everything)):
            path, _, attribute = name.rpartition(".")
            owner = module.get_submodule(path)
            here = f"lora.targets: pattern {pattern!r} matches {name}"
            if attribute != "weight" or not isinstance(owner, nn.Linear | Conv1D):
                such = f", such as {able[0]}" if able else "; this model has none"
                raise ConfigError(
                    f"{here} ({type(owner).__name__}.{attribute}); adapters go on weights of "
                    f"Linear and Conv1D layers{such}"
                )
            if name in tied:
                raise ConfigError(
                    f"{here}, which is tied to {tied[name]}: merging an adapter into one of them "
                    "would change the other; exclude it"
                )
            if hasattr(owner, "lora_A") or hasattr(owner, "lora_B"):
                raise ConfigError(f"{here}, whose layer has a lora_A or lora_B of its own")
            chosen.add(name)
    return [name for name in able if name in chosen]


def _copied(origin: WeightSource, wrappers: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Return copies of modules over the same tensors, which share the same submodules."""
    tensors = (*origin.names.parameters.values(), *origin.names.buffers.values())
    try:
        return copy.deepcopy(tuple(wrappers), {id(tensor): tensor for tensor in tensors})
    except (TypeError, RuntimeError, AttributeError) as error:
        raise CompileError(
            f"lora needs a module that copy.deepcopy can copy, {type(origin.module).__name__} "
            f"cannot be: {error}; remove open files, locks and graphs from it"
        ) from error


def _add(adapter: Adapter, layer: Any) -> None:
    """Add an adapter to a layer, in place; the name of its class stays."""
    rows, columns = layer.weight.shape
    inputs, outputs = (rows, columns) if adapter.transposed else (columns, rows)
    layer.lora_A = nn.Linear(inputs, adapter.rank, bias=False, dtype=torch.float32)
    layer.lora_B = nn.Linear(adapter.rank, outputs, bias=False, dtype=torch.float32)
    layer.lora_scale, layer.lora_dropout = adapter.scale, adapter.dropout
    layer.__class__ = type(type(layer).__name__, (_AdaptedLayer, type(layer)), {})


class AdaptedOrigin:
    """Another origin's weights, and the weights of the adapters."""

    def __init__(
        self, base: WeightSource, module: nn.Module, adapters: Collection[Adapter]
    ) -> None:
        self.module = module
        self.fake_mode = base.fake_mode
        self.names = TensorNames.of(module)
        self.aliases = self.names.aliases
        self.bfloat16 = base.bfloat16
        self.stored = base.stored
        self._base = base
        parameters = self.names.parameters
        self._down = {a.down: tuple(parameters[a.down].shape) for a in adapters}
        self._up = {a.up: tuple(parameters[a.up].shape) for a in adapters}

    def materialise(
        self, seed: int, names: Iterable[str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor); an adapter's tensors depend only on the seed and the name."""
        everything = (*self.names.parameters, *self.names.buffers)
        wanted = list(dict.fromkeys(everything if names is None else names))
        own = [name for name in wanted if name in self._down or name in self._up]
        rest = [name for name in wanted if name not in self._down and name not in self._up]
        return itertools.chain(self._base.materialise(seed, rest), self._fresh(seed, own))

    def mask(self, name: str) -> "PackedIndex | None":
        """Return the mask that a weight of the base has at its origin."""
        return None if name in self._down or name in self._up else self._base.mask(name)

    def draws(self, names: Iterable[str]) -> bool:
        """Return whether tensors depend on the seed; the weights A of all adapters do."""
        wanted = list(names)
        rest = [name for name in wanted if name not in self._down and name not in self._up]
        return any(name in self._down for name in wanted) or self._base.draws(rest)

    def _fresh(self, seed: int, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            if name in self._up:
                yield name, torch.zeros(self._up[name])
                continue
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            weight = torch.empty(self._down[name])
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
            yield name, weight
