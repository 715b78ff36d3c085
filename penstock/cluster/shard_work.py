"""What a shard does between the messages: it reads and writes the store."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.cluster.plan import positions_of
from penstock.errors import ClusterError
from penstock.fabric.transfers import Operation
from penstock.program import Program
from penstock.store import Store


class StoreOfShard:
    """Streams a store's weights, gives it gradients, and commits it."""

    def __init__(
        self, program: Program, store: Store, shard: int, recompute: Collection[int]
    ) -> None:
        self._program, self._recompute = program, recompute
        self._store, self._shard = store, shard

    def begin(self, step: int) -> None:
        """Forget what came of a step that was not committed."""
        if self._store.step != step - 1:
            raise ClusterError(
                f"shard {self._shard} stands at step {self._store.step}, step {step} was begun"
            )
        self._store.discard()

    def fetch(self, operation: Operation) -> Sequence[np.ndarray]:
        """Return the bytes of every chunk of this shard's."""
        stage = self._program.stages[operation.stage]
        positions = positions_of(stage, operation.sweep, self._recompute)
        whole = operation.sweep != "backward"
        tensors = self._store.fetch(operation.stage, None if whole else positions)
        flat = [tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors]
        pieces = [operation.weights[number] for number in operation.of_shard(self._shard)]
        return [flat[p.tensor][p.begin * p.width : p.end * p.width] for p in pieces]

    def receive(self, operation: Operation, gradients: Mapping[int, np.ndarray | None]) -> None:
        """Take this shard's gradients of an operation."""
        stage = self._store.program.stages[operation.stage]
        weights = [self._store.program.weights[name] for name in stage.weights]
        shapes = [weight.shape for weight in weights if weight.trainable]
        whole: list[torch.Tensor | None] = [None] * len(shapes)
        for number, gradient in sorted(gradients.items()):
            piece = operation.gradients[number]
            if gradient is None:
                continue
            if (tensor := whole[piece.tensor]) is None:
                tensor = whole[piece.tensor] = torch.empty(shapes[piece.tensor])
            tensor.view(-1)[piece.begin : piece.end] = torch.from_numpy(gradient)
        self._store.receive(operation.stage, whole)

    def prepare(self) -> Mapping[str, Any]:
        """All gradients are here; what they are the store knows."""
        return {}

    def commit(self, step: int, decision: Mapping[str, Any]) -> Mapping[str, Any]:
        """Commit the step."""
        commit = self._store.commit()
        return {
            "step": commit.step,
            "grad_norm": commit.grad_norm.hex(),
            "clip_scale": commit.clip_scale.hex(),
            "learning_rate": commit.learning_rate.hex(),
        }
