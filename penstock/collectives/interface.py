"""What every fabric offers: a few verbs over tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.collectives.tree_reduce import PartialSum


@dataclass
class CollectiveTraffic:
    """Bytes that left the store (`broadcast_bytes`) and that reached it (`reduced_bytes`)."""

    broadcast_bytes: int = 0
    reduced_bytes: int = 0


class Fabric(Protocol):
    """Moves a stage's weights to every engine and its gradients, summed, back."""

    traffic: CollectiveTraffic

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """Hand the same tensors to every engine; one entry per engine."""
        ...

    def reduce(
        self, parts: Sequence[Sequence[PartialSum]], leaves: int
    ) -> tuple[torch.Tensor | None, ...]:
        """Finish the sum over `leaves` micro-batches from each engine's part; float32."""
        ...

    def close(self) -> None:
        """Give back whatever the fabric holds."""
        ...
