"""The interface of a fabric: broadcast of weights, reduction of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.collectives.tree_reduce import PartialSum


@dataclass
class CollectiveTraffic:
    """Bytes sent by the store (`broadcast_bytes`) and received by it (`reduced_bytes`)."""

    broadcast_bytes: int = 0
    reduced_bytes: int = 0


class Fabric(Protocol):
    """Sends a stage's weights to every engine, and returns the sum of their gradients."""

    traffic: CollectiveTraffic

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """Send the same tensors to every engine; return one entry per engine."""
        ...

    def reduce(
        self, parts: Sequence[Sequence[PartialSum]], leaves: int
    ) -> tuple[torch.Tensor | None, ...]:
        """Add the engines' partial sums; return the sum over `leaves` micro-batches, float32."""
        ...

    def close(self) -> None:
        """Release the fabric's resources."""
        ...
