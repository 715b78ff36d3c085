"""The fabric of one process: engines read the store's memory in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from penstock.collectives.interface import CollectiveTraffic
from penstock.collectives.tree_reduce import PartialSum, TreeReduction

if TYPE_CHECKING:
    from penstock.sparsity import StreamedWeight


class LocalFabric:
    """Passes references; counts the bytes that a network fabric would carry."""

    def __init__(self, engines: int = 1) -> None:
        self._engines = engines
        self.traffic = CollectiveTraffic()

    def broadcast(self, weights: Sequence[StreamedWeight]) -> list[Sequence[StreamedWeight]]:
        """Pass the same weights to every engine; each byte counts once."""
        self.traffic.broadcast_bytes += sum(weight.nbytes for weight in weights)
        return [weights] * self._engines

    def reduce(
        self, parts: Sequence[Sequence[PartialSum]], leaves: int
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the sum over all micro-batches; only the root counts as received bytes."""
        total = TreeReduction(leaves)
        for nodes in parts:
            for node in nodes:
                total.add(node)
        root = total.root()
        self.traffic.reduced_bytes += sum(t.nbytes for t in root if t is not None)
        return root

    def close(self) -> None:
        """Do nothing: there are no resources."""
