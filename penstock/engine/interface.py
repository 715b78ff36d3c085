"""The interface of an engine: a step is a fixed sequence of these calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from penstock.collectives import PartialSum
from penstock.engine.memory import MemoryAccount
from penstock.engine.wafer_plan import WaferPlan
from penstock.program import Program
from penstock.sparsity import StreamedWeight
from penstock.step_schedule import Operation


@dataclass(frozen=True)
class Batch:
    """The part of a step's global batch that one engine computes.

    `micro_batches` contains, per micro-batch, a map from the program's inputs to tensors. The first
    one is number `first` of the step's `total`. `loss_scale` is the gradient of the step's loss
    with respect to each micro-batch's loss: 1 / tokens for summed losses, 1 / micro-batches for
    means. Steps with equal `masks` have the same masks of sparse weights and compute gradients for
    the same of their elements; None if that is not known. `kept` are inputs that the caller keeps
    from step to step, on the engine's device: they are not copied, and a step may write into them.
    """

    micro_batches: Sequence[Mapping[str, torch.Tensor]]
    first: int
    total: int
    seed: int
    step: int
    loss_scale: float = 1.0
    masks: tuple[int, bool] | None = None
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict)


class PendingGradients(Protocol):
    """A stage's gradients that are being copied from the device."""

    def wait(self) -> list[PartialSum]:
        """Return the partial sums of the reduction tree that this engine holds, in host memory."""
        ...


class Engine(Protocol):
    """Computes stages. Calls per step: `begin`; then `load` and `compute` for each operation of the
    schedule, in order; `losses` after the turn. For evaluation, the schedule contains only `infer`,
    and `results` follows.

    Weights are passed as the fabric delivers them, and may be invalid when the next `load` has
    returned.
    """

    program: Program
    memory: MemoryAccount

    @property
    def stages_ahead(self) -> int:
        """How many stages' weights may be loading while the previous stage computes."""
        ...

    def begin(self, batch: Batch) -> None:
        """Accept the inputs of a step and compute the prelude; discard any earlier step."""
        ...

    def load(self, stage: int, weights: Sequence[StreamedWeight]) -> None:
        """Start copying a stage's weights to the device; the next call for this stage uses them."""
        ...

    def forward(self, stage: int) -> None:
        """Run a stage on all micro-batches; keep the values that backward needs."""
        ...

    def turn(self, stage: int) -> PendingGradients:
        """Run the last stage forward and backward; return its weights' gradients."""
        ...

    def backward(self, stage: int) -> PendingGradients:
        """Run a stage backward on all micro-batches; return its weights' gradients."""
        ...

    def infer(self, stage: int) -> None:
        """Run a stage forward; keep nothing for a backward."""
        ...

    def results(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the program's results per micro-batch, after `infer` of the last stage."""
        ...

    def losses(self) -> list[float]:
        """Return the loss of each micro-batch, once the last stage has run."""
        ...

    def is_finite(self, stage: int) -> bool:
        """Return, after `infer` of a stage, whether its outputs contain no NaN and no infinity."""
        ...

    def release(self) -> None:
        """Release memory that is kept between steps only to make them faster."""
        ...


def compute(engine: Engine, operation: Operation) -> PendingGradients | None:
    """Compute an operation whose weights are loaded; return gradients if its sweep produces them.

    A stage in such a sweep returns an object even if it has no gradients to send.
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


SLOTS = 2  # the stage that computes, and the stage that is being loaded


@dataclass(frozen=True)
class EnginePlan:
    """`recompute` are the stages whose forward is repeated in the backward sweep.

    `beside_bytes` is the engine's memory besides computation: data that is being copied.
    `dense_gradients` says that some steps compute the gradient of every element of sparse weights.
    `wafer` is how the stages lie on a mesh of cores, for an engine that counts their cycles.
    `cuda_graphs` lets an engine on a GPU record a step and repeat it.
    """

    recompute: frozenset[int] = frozenset()
    slots: int = SLOTS
    beside_bytes: int = 0
    dense_gradients: bool = False
    wafer: WaferPlan | None = field(default=None, compare=False)
    cuda_graphs: bool = field(default=True, compare=False)
