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
from penstock.store import GradientReport, Store, trainable_weights


class StoreOfShard:
    """Streams a store's weights, gives it gradients, and commits it."""

    def __init__(
        self, program: Program, store: Store, shard: int, recompute: Collection[int]
    ) -> None:
        self._program, self._recompute = program, recompute
        self._store, self._shard = store, shard

    def held_steps(self) -> Sequence[int]:
        """Return the step at which the store stands: in the trainer's process it dies with it."""
        return [self._store.step]

    def go_back(self, step: int) -> None:
        """Require that the store stands there."""
        if self._store.step != step:
            raise ClusterError(
                f"shard {self._shard} stands at step {self._store.step} and cannot go back to "
                f"step {step}; resume the run"
            )

    def begin(self, step: int) -> None:
        """Forget what came of a step that was not committed."""
        if self._store.step != step - 1:
            raise ClusterError(
                f"shard {self._shard} stands at step {self._store.step}, step {step} was begun"
            )
        self._store.discard()

    def fetch(self, operation: Operation) -> Sequence[np.ndarray]:
        """Return the bytes of every chunk of this shard's."""
        stage, held = self._program.stages[operation.stage], self._store.program
        positions = positions_of(stage, operation.sweep, self._recompute)
        names = [stage.weights[position] for position in positions]
        here = held.stages[operation.stage].weights
        wanted = [name for name in names if name in here]
        views = self._store.fetch(operation.stage, [here.index(name) for name in wanted])
        flat = {
            name: view.view(-1).view(torch.uint8).numpy()
            for name, view in zip(wanted, views, strict=True)
        }
        parts = []
        for number in operation.of_shard(self._shard):
            piece = operation.weights[number]
            name = names[piece.tensor]
            first = held.weights[name].begin
            parts.append(
                flat[name][(piece.begin - first) * piece.width : (piece.end - first) * piece.width]
            )
        return parts

    def receive(self, operation: Operation, gradients: Mapping[int, np.ndarray | None]) -> None:
        """Take this shard's gradients of an operation."""
        stage, held = self._program.stages[operation.stage], self._store.program
        trained = trainable_weights(self._program, stage)
        here = trainable_weights(held, held.stages[operation.stage])
        whole: dict[str, torch.Tensor] = {}
        for number, gradient in gradients.items():
            piece = operation.gradients[number]
            if gradient is None:
                continue
            spec = held.weights[trained[piece.tensor]]
            if spec.name not in whole:
                whole[spec.name] = torch.empty(spec.shape)
            begin, end = piece.begin - spec.begin, piece.end - spec.begin
            whole[spec.name].view(-1)[begin:end] = torch.from_numpy(gradient)
        self._store.receive(operation.stage, [whole.get(name) for name in here])

    def prepare(self) -> Mapping[str, Any]:
        """Say what the shard knows of its gradients."""
        report = self._store.prepare()
        return {
            "squares": [square.hex() for square in report.squares],
            "silent": list(report.silent),
            "missing": list(report.missing),
            "non_finite": {
                str(stage): list(names) for stage, names in (report.non_finite or {}).items()
            },
        }

    def commit(self, step: int, decision: Mapping[str, Any]) -> Mapping[str, Any]:
        """Commit the step with the norm of all shards' gradients."""
        commit = self._store.decide(float.fromhex(decision["norm"]))
        return {
            "step": commit.step,
            "grad_norm": commit.grad_norm.hex(),
            "clip_scale": commit.clip_scale.hex(),
            "learning_rate": commit.learning_rate.hex(),
        }


def report_of(prepared: Mapping[str, Any]) -> GradientReport:
    """Return the report that a shard's `prepare` has said."""
    return GradientReport(
        tuple(float.fromhex(square) for square in prepared["squares"]),
        tuple(prepared["silent"]),
        tuple(prepared["missing"]),
        {int(stage): tuple(names) for stage, names in prepared["non_finite"].items()},
    )
