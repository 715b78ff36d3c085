"""The interface of a fabric: broadcast of weights, reduction of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.collectives.tree_reduce import PartialSum

if TYPE_CHECKING:
    from penstock.sparsity import StreamedWeight


@dataclass
class CollectiveTraffic:
    """Bytes sent by the store (`broadcast_bytes`) and received by it (`reduced_bytes`)."""

    broadcast_bytes: int = 0
    reduced_bytes: int = 0


class Fabric(Protocol):
    """Sends a stage's weights to every engine, and returns the sum of their gradients."""

    traffic: CollectiveTraffic

    def broadcast(self, weights: Sequence[StreamedWeight]) -> list[Sequence[StreamedWeight]]:
        """Send the same weights to every engine; return one entry per engine."""
        ...

    def reduce(
        self, parts: Sequence[Sequence[PartialSum]], leaves: int
    ) -> tuple[torch.Tensor | None, ...]:
        """Add the engines' partial sums; return the sum over `leaves` micro-batches, float32."""
        ...

    def close(self) -> None:
        """Release the fabric's resources."""
        ...
