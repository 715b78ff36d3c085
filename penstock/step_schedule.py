"""The schedule of a step: the ordered list of operations that every part of a run follows.

An operation is one stage in one sweep: the stage's weights are fetched, the stage is computed, and
from the turn on its gradients are returned. The local step, the nodes of a distributed step, the
dry run that predicts an engine's memory, evaluation, generation and the read-ahead from flash all
use this list, so that no part defines a sweep of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from penstock.program import Program, Stage

Sweep = Literal["forward", "turn", "backward", "infer"]
"""`turn` is the last stage's forward and backward in one; `infer` is a forward that keeps
nothing."""


@dataclass(frozen=True)
class Operation:
    """One stage in one sweep.

    `number` is the operation's index in the schedule. `weights` are the names of the fetched
    weights, `positions` their indices among the stage's weights. `gradients` are the names of the
    weights whose gradients the operation returns: all trainable weights of the stage, or none.
    `flops` (a multiply-add counted as two) and `transient_bytes` (the peak of the call's
    allocations) are per micro-batch.
    """

    number: int
    stage: int
    sweep: Sweep
    positions: tuple[int, ...]
    weights: tuple[str, ...]
    gradients: tuple[str, ...]
    flops: int
    transient_bytes: int


@dataclass(frozen=True)
class StepSchedule:
    """The operations of a step, in order."""

    operations: tuple[Operation, ...]

    @classmethod
    def of(cls, program: Program, recompute: Collection[int] = ()) -> StepSchedule:
        """Return the schedule of a training step: forward sweep, turn of the last stage, backward
        sweep.

        Args:
            program: the program to train.
            recompute: the stages whose forward is repeated in the backward sweep.
        """
        order = sweep_order(len(program.stages))
        return cls(
            tuple(
                _operation(program, number, program.stages[stage], sweep, stage in recompute)
                for number, (stage, sweep) in enumerate(order)
            )
        )

    @classmethod
    def forward_only(cls, program: Program) -> StepSchedule:
        """Return the schedule of a forward sweep that keeps nothing: every stage, in order."""
        return cls(
            tuple(
                _operation(program, stage.index, stage, "infer", False) for stage in program.stages
            )
        )

    @property
    def before_loss(self) -> tuple[Operation, ...]:
        """The operations up to and including the turn, after which the losses are known."""
        return tuple(each for each in self.operations if each.sweep != "backward")

    @property
    def after_loss(self) -> tuple[Operation, ...]:
        """The operations of the backward sweep."""
        return tuple(each for each in self.operations if each.sweep == "backward")


def sweep_order(stages: int) -> list[tuple[int, Sweep]]:
    """Return, for a number of stages, the stages and sweeps of a training step in order."""
    last = stages - 1
    order: list[tuple[int, Sweep]] = [(stage, "forward") for stage in range(last)]
    order.append((last, "turn"))
    order += [(stage, "backward") for stage in reversed(range(last))]
    return order


def _operation(
    program: Program, number: int, stage: Stage, sweep: Sweep, recompute: bool
) -> Operation:
    kind = stage.kind
    positions = tuple(range(len(stage.weights)))
    if sweep == "backward" and not recompute:
        positions = kind.backward_weights
    returns = sweep in ("turn", "backward") and any(kind.outputs_grad)
    again = kind.recompute_transient_bytes if recompute else kind.backward_transient_bytes
    flops, transient_bytes = {
        "infer": (kind.forward_flops, kind.forward_transient_bytes),
        "forward": (kind.forward_flops, kind.forward_transient_bytes),
        "turn": (kind.forward_flops + kind.backward_flops, kind.turn_transient_bytes),
        "backward": (kind.backward_flops + recompute * kind.forward_flops, again),
    }[sweep]
    return Operation(
        number,
        stage.index,
        sweep,
        positions,
        tuple(stage.weights[position] for position in positions),
        tuple(n for n in stage.weights if returns and program.weights[n].trainable),
        flops,
        transient_bytes,
    )
