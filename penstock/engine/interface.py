"""What the trainer asks of an engine: a step is a fixed sequence of these calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.collectives import PartialSum
from penstock.engine.memory import MemoryAccount
from penstock.program import Program
from penstock.step_schedule import Operation


@dataclass(frozen=True)
class Batch:
    """The part of a step's global batch that one engine computes.

    `micro_batches` maps, per micro-batch, the program's inputs to tensors; the first of them is
    number `first` of the step's `total`. `loss_scale` is the gradient of the step's loss with
    respect to each micro-batch's: 1 / tokens for summed losses, 1 / micro-batches for means.
    """

    micro_batches: Sequence[Mapping[str, torch.Tensor]]
    first: int
    total: int
    seed: int
    step: int
    loss_scale: float = 1.0


class PendingGradients(Protocol):
    """A stage's gradients on their way from the device."""

    def wait(self) -> list[PartialSum]:
        """Return the sums of the tree that this engine holds, in host memory."""
        ...


class Engine(Protocol):
    """Computes stages. Calls per step: `begin`; then `load` and `compute` for each operation of the
    schedule, in its order; `losses` after the turn. For evaluation: the same with a schedule of
    `infer` alone; then `results`.

    Weights come as the fabric hands them over and may be gone when the next `load` has returned.
    """

    program: Program
    memory: MemoryAccount

    @property
    def stages_ahead(self) -> int:
        """How many stages' weights may be loaded while the stage before them computes."""
        ...

    def begin(self, batch: Batch) -> None:
        """Take the inputs of a step and compute the prelude; forget any step before."""
        ...

    def load(self, stage: int, weights: Sequence[torch.Tensor]) -> None:
        """Start moving a stage's weights to the device; they are used by the next call for it."""
        ...

    def forward(self, stage: int) -> None:
        """Run a stage on all micro-batches, keeping what backward needs."""
        ...

    def turn(self, stage: int) -> PendingGradients:
        """Run the last stage forward and backward; return its weights' gradients."""
        ...

    def backward(self, stage: int) -> PendingGradients:
        """Run a stage backward on all micro-batches; return its weights' gradients."""
        ...

    def infer(self, stage: int) -> None:
        """Run a stage forward, keeping nothing for a backward."""
        ...

    def results(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the program's results per micro-batch, after `infer` of the last stage."""
        ...

    def losses(self) -> list[float]:
        """Return the loss of each micro-batch, once the last stage has run."""
        ...

    def is_finite(self, stage: int) -> bool:
        """Tell, after `infer` of a stage, whether it wrote no NaN and no infinity."""
        ...


def compute(engine: Engine, operation: Operation) -> PendingGradients | None:
    """Compute an operation whose weights are loaded; return its gradients, if its sweep makes any.

    A stage in a sweep that makes gradients returns them even where none is to be sent.
    """
    match operation.sweep:
        case "forward":
            engine.forward(operation.stage)
        case "infer":
            engine.infer(operation.stage)
        case "turn":
            return engine.turn(operation.stage)
        case "backward":
            return engine.backward(operation.stage)
    return None


SLOTS = 2  # the stage that computes, and the one on its way


@dataclass(frozen=True)
class EnginePlan:
    """`recompute` are the stages whose forward is made again in the backward sweep.

    `beside_bytes` is what an engine has beside what it computes with: what is on its way.
    """

    recompute: frozenset[int] = frozenset()
    slots: int = SLOTS
    beside_bytes: int = 0
