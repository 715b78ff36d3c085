"""The schedule of a step: the ordered list of operations that every part of a run follows.

An operation is one stage in one sweep: the stage's weights are fetched, the stage is computed, and
from the turn on its gradients are returned. The local step, the nodes of a distributed step, the
dry run that predicts an engine's memory, evaluation, generation and the read-ahead from flash all
use this list, so that no part defines a sweep of its own.

A run has two schedules. Some steps of a run with sparse weights compute the gradient of every
element, absent ones included, to choose the entries that their masks grow. These steps compute the
same operations with the same weights, but allocate and return more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from penstock.program import Program, Stage, extra_gradient_bytes

if TYPE_CHECKING:
    from penstock.sparsity import SparsityPolicy

Value = TypeVar("Value")
Other = TypeVar("Other")

Sweep = Literal["forward", "turn", "backward", "infer"]
"""`turn` is the last stage's forward and backward in one; `infer` is a forward that keeps
nothing."""

_GRADIENT_WIDTH = 4  # bytes of a float32


@dataclass(frozen=True)
class Operation:
    """One stage in one sweep.

    `number` is the operation's index in the schedule. `weights` are the names of the fetched
    weights, `positions` their indices among the stage's weights. `gradients` are the names of the
    weights whose gradients the operation returns: all trainable weights of the stage, or none.
    `flops` (a multiply-add counted as two) and `transient_bytes` (the peak of the call's
    allocations) are per micro-batch. `gradient_bytes` are those of the sum over micro-batches, in
    float32, with as many entries of sparse weights as their masks may keep. `dense_gradients` are
    the sparse weights among `gradients` whose gradients cover every element instead.
    """

    number: int
    stage: int
    sweep: Sweep
    positions: tuple[int, ...]
    weights: tuple[str, ...]
    gradients: tuple[str, ...]
    flops: int
    transient_bytes: int
    gradient_bytes: int = 0
    dense_gradients: tuple[str, ...] = ()


@dataclass(frozen=True)
class ByStep(Generic[Value]):
    """A value of each step of a run: `dense` in steps that compute dense gradients of sparse
    weights, `usual` in all others.

    Args:
        needs_dense_gradients: whether a step, counted from 1, computes them; depends on the step
            number alone, so that all processes of a run agree.
    """

    usual: Value
    dense: Value
    needs_dense_gradients: Callable[[int], bool]

    @classmethod
    def always(cls, value: Value) -> ByStep[Value]:
        """Return the same value for every step."""
        return cls(value, value, lambda step: False)

    def __call__(self, step: int) -> Value:
        return self.dense if self.needs_dense_gradients(step) else self.usual

    def map(self, function: Callable[[Value], Other]) -> ByStep[Other]:
        """Return a function of the value of each step."""
        usual = function(self.usual)
        dense = usual if self.dense is self.usual else function(self.dense)
        return ByStep(usual, dense, self.needs_dense_gradients)


@dataclass(frozen=True)
class StepSchedule:
    """The operations of a step, in order."""

    operations: tuple[Operation, ...]

    @classmethod
    def of(
        cls, program: Program, recompute: Collection[int] = (), dense_gradients: bool = False
    ) -> StepSchedule:
        """Return the schedule of a training step: forward sweep, turn of the last stage, backward
        sweep.

        Args:
            program: the program to train.
            recompute: the stages whose forward is repeated in the backward sweep.
            dense_gradients: whether the step computes the gradient of every element of sparse
                weights.
        """
        order = sweep_order(len(program.stages))
        operations = [
            _operation(program, number, program.stages[stage], sweep, stage in recompute)
            for number, (stage, sweep) in enumerate(order)
        ]
        if dense_gradients:
            operations = [_with_dense_gradients(program, operation) for operation in operations]
        return cls(tuple(operations))

    @classmethod
    def by_step(
        cls,
        program: Program,
        recompute: Collection[int] = (),
        policy: SparsityPolicy | None = None,
    ) -> ByStep[StepSchedule]:
        """Return the schedules of a run.

        Args:
            program: the program to train.
            recompute: as for `of`.
            policy: says which steps compute dense gradients, if the run has sparse weights.
        """
        usual = cls.of(program, recompute)
        if policy is None or not policy.grown_by_gradient:
            return ByStep.always(usual)
        return ByStep(usual, cls.of(program, recompute, True), policy.needs_dense_gradients)

    @classmethod
    def forward_only(cls, program: Program) -> StepSchedule:
        """Return the schedule of a forward sweep that keeps nothing: every stage, in order."""
        return cls(
            tuple(
                _operation(program, stage.index, stage, "infer", False) for stage in program.stages
            )
        )


def sweep_order(stages: int) -> list[tuple[int, Sweep]]:
    """Return, for a number of stages, the stages and sweeps of a training step in order."""
    last = stages - 1
    order: list[tuple[int, Sweep]] = [(stage, "forward") for stage in range(last)]
    order.append((last, "turn"))
    order += [(stage, "backward") for stage in reversed(range(last))]
    return order


def narrow_gradient_bytes(program: Program, operation: Operation) -> int:
    """Return the part of an operation's `gradient_bytes` that a micro-batch computes in bfloat16.

    The gradients of the entries of sparse weights are float32 in every precision.
    """
    return sum(
        _GRADIENT_WIDTH * weight.entries
        for weight in map(program.weights.__getitem__, operation.gradients)
        if weight.stream_dtype.itemsize == 2 and not weight.is_sparse
    )


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
    gradients = tuple(n for n in stage.weights if returns and program.weights[n].trainable)
    return Operation(
        number,
        stage.index,
        sweep,
        positions,
        tuple(stage.weights[position] for position in positions),
        gradients,
        flops,
        transient_bytes,
        sum(_GRADIENT_WIDTH * program.weights[name].entries for name in gradients),
    )


def _with_dense_gradients(program: Program, operation: Operation) -> Operation:
    """Return an operation that computes the gradient of every element of its sparse weights."""
    stage = program.stages[operation.stage]
    weights = {n: program.weights[n] for n in operation.gradients if program.weights[n].is_sparse}
    flops = sum(
        2 * sum(use.product_tokens) * (weight.elements - weight.entries)
        for position, use in stage.kind.sparse.items()
        if (weight := weights.get(stage.weights[position])) is not None
    )
    extra = sum(
        extra_gradient_bytes(weight.elements, weight.entries, weight.stream_dtype.itemsize)
        for weight in weights.values()
    )
    absent = sum(weight.elements - weight.entries for weight in weights.values())
    return replace(
        operation,
        flops=operation.flops + flops,
        transient_bytes=operation.transient_bytes + extra,
        gradient_bytes=operation.gradient_bytes + _GRADIENT_WIDTH * absent,
        dense_gradients=tuple(weights),
    )
