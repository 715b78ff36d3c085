"""The content of a store: weights, and the stages that use them. A program, or one shard's part of
it.

A `Program` is itself a holding. In a sharded store, each shard has a `HeldPart`: the same stages,
and of every weight either a flat piece or nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.program import WeightSpec


class HeldStage(Protocol):
    """A stage as the store needs it: its place in the sweep, and the names of its weights."""

    @property
    def index(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def weights(self) -> tuple[str, ...]: ...


class Holding(Protocol):
    """All that a store needs to know about its content."""

    @property
    def name(self) -> str: ...

    @property
    def stages(self) -> Sequence[HeldStage]: ...

    @property
    def weights(self) -> Mapping[str, WeightSpec]: ...


@dataclass(frozen=True)
class PartStage:
    """A stage, with the names of the weights of which the shard has a piece."""

    index: int
    name: str
    weights: tuple[str, ...]


@dataclass(frozen=True)
class HeldPart:
    """The content of one shard; the shape of a weight is that of its flat piece.

    `capacities` are the most entries that the whole of every sparse weight may have. The capacity
    of its piece is the room that the shard begins with.
    """

    name: str
    stages: tuple[PartStage, ...]
    weights: Mapping[str, WeightSpec]
    capacities: Mapping[str, int] = field(default_factory=dict)


def most_entries(holding: Holding, name: str) -> int:
    """Return the most entries that a sparse weight, or a shard's part of it, can ever have."""
    weight = holding.weights[name]
    if isinstance(holding, HeldPart):
        return min(weight.elements, holding.capacities[name])
    return weight.capacity


def whole_capacities(holding: Holding) -> Mapping[str, int] | None:
    """Return the capacities of the whole weights of a shard; None if the holding is no shard."""
    return holding.capacities if isinstance(holding, HeldPart) else None


def home_stages(holding: Holding) -> dict[str, int]:
    """Return the home stage of every weight, in the order in which the stages use them."""
    table: dict[str, int] = {}
    for stage in holding.stages:
        for name in stage.weights:
            table.setdefault(name, stage.index)
    return table
