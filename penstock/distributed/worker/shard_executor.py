"""What a shard does between the messages: it reads and writes the store.

The store may be in the trainer's process or in one of the shard's own; where it is decides only to
which steps it can go back.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from penstock.distributed.protocol.transfer_schedule import Operation
from penstock.distributed.run_spec import positions_of
from penstock.errors import ClusterError, ProtocolError
from penstock.program import Program
from penstock.store import (
    Commit,
    Compared,
    GradientReport,
    ReplicatedStore,
    Store,
    trainable_weights,
)


class ShardPlace(Protocol):
    """Where a shard's store is."""

    @property
    def store(self) -> Store: ...

    def held_steps(self) -> Sequence[int]:
        """Return the steps that it can go back to."""
        ...

    def go_back(self, step: int) -> None:
        """Have the store stand at one of them."""
        ...


class ShardHere:
    """A shard's store in the trainer's process, with which it dies."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def held_steps(self) -> Sequence[int]:
        """Return the step at which the store stands."""
        return [self.store.step]

    def go_back(self, step: int) -> None:
        """Require that the store stands there."""
        require_at(self.store, step)


def require_at(store: Store, step: int) -> None:
    """Refuse to go on from a step at which a store does not stand."""
    if store.step != step:
        raise ClusterError(
            f"{store.program.name} stands at step {store.step} and cannot go back to step {step}; "
            "resume the run"
        )


class StoreOfShard:
    """Streams a store's weights, gives it gradients, and commits it.

    Args:
        has_replica: whether another node should hold the same, which is compared with every step.
    """

    def __init__(
        self,
        program: Program,
        place: ShardPlace,
        shard: int,
        recompute: Collection[int],
        has_replica: bool = False,
    ) -> None:
        self._program, self._recompute = program, recompute
        self._place, self._shard, self._has_replica = place, shard, has_replica

    @property
    def _store(self) -> Store:
        return self._place.store

    def held_steps(self) -> Sequence[int]:
        """Return the steps that the store can go back to."""
        return self._place.held_steps()

    def go_back(self, step: int) -> None:
        """Have the store stand at one of them."""
        self._place.go_back(step)

    def begin(self, step: int) -> None:
        """Forget what came of a step that was not committed."""
        if self._store.step != step - 1:
            raise ClusterError(
                f"shard {self._shard} stands at step {self._store.step}, step {step} was begun"
            )
        self._store.discard()

    def settle(self) -> None:
        """Make the updates of the step before: no fetch will ask for them."""
        self._store.flush()

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
        """Say what the shard knows of its gradients, and what it holds."""
        report = body_of_report(self._store.prepare())
        if isinstance(self._store, ReplicatedStore) and self._has_replica:
            report["held"] = [list(each) for each in self._store.compared()]
        return report

    def commit(self, step: int, decision: Mapping[str, Any]) -> Mapping[str, Any]:
        """Commit the step with the norm of all shards' gradients."""
        return body_of_commit(self._store.decide(float.fromhex(decision["norm"])))


@dataclass(frozen=True)
class ShardReport:
    """What a shard says before a step is decided.

    `held` are checksums of a part of what it holds, if it has a replica: the same of both.
    """

    gradients: GradientReport
    held: Compared = ()

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> ShardReport:
        """Return what a message has said.

        **Raises:** `ProtocolError` if it is no such report.
        """
        gradients, held = report_of(said), said.get("held", [])
        try:
            return cls(gradients, tuple((_name(what), _name(sum_)) for what, sum_ in held))
        except (TypeError, ValueError) as error:
            raise _none("checksums of what it holds", said, error) from None

    def difference(self, other: ShardReport) -> str | None:
        """Say in what it differs from that of another node of the shard; None if in nothing."""
        # As they are said: NaN is what it is, though not equal to itself.
        if body_of_report(self.gradients) != body_of_report(other.gradients):
            return "a step's gradients"
        for ours, theirs in itertools.zip_longest(self.held, other.held):
            if ours != theirs:
                return str((ours or theirs)[0])
        return None


def body_of_report(report: GradientReport) -> dict[str, Any]:
    """Return what a message says of a report; figures keep all their bits."""
    return {
        "squares": [square.hex() for square in report.squares],
        "silent": list(report.silent),
        "missing": list(report.missing),
        "non_finite": {
            str(stage): list(names) for stage, names in (report.non_finite or {}).items()
        },
        "zero": dict(report.zero),
    }


def report_of(said: Mapping[str, Any]) -> GradientReport:
    """Return the report that a message has said.

    **Raises:** `ProtocolError` if it is none.
    """
    try:
        return GradientReport(
            tuple(float.fromhex(square) for square in said["squares"]),
            tuple(map(int, said["silent"])),
            tuple(map(_name, said["missing"])),
            {int(stage): tuple(map(_name, names)) for stage, names in said["non_finite"].items()},
            {_name(name): int(elements) for name, elements in said["zero"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _none("a report on gradients", said, error) from None


def body_of_commit(commit: Commit) -> dict[str, Any]:
    """Return what a message says of a commit."""
    return {
        "step": commit.step,
        "grad_norm": commit.grad_norm.hex(),
        "clip_scale": commit.clip_scale.hex(),
        "learning_rate": commit.learning_rate.hex(),
    }


def commit_of(said: Mapping[str, Any]) -> Commit:
    """Return the commit that a message has said.

    **Raises:** `ProtocolError` if it is none.
    """
    try:
        return Commit(
            int(said["step"]),
            float.fromhex(said["grad_norm"]),
            float.fromhex(said["clip_scale"]),
            float.fromhex(said["learning_rate"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _none("a commit", said, error) from None


def _name(said: Any) -> str:
    if not isinstance(said, str):
        raise TypeError(f"{said!r} is no name")
    return said


def _none(what: str, said: Mapping[str, Any], error: Exception) -> ProtocolError:
    return ProtocolError(
        f"a shard says {str(said)[:80]!r} for {what} ({type(error).__name__}: {error}); do all "
        "nodes run the same version of Penstock?"
    )
