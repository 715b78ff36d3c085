"""The engine without arithmetic: same calls, same shapes, same bytes, no computation.

It runs `TorchEngine`'s own code on tensors without memory. Tests of schedules, traffic and memory
use it, and `recompute_planner.py` predicts an engine's bytes with it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.collectives import PartialSum
from penstock.engine.expanded_weights import most_bitmap_bytes
from penstock.engine.interface import Batch, EnginePlan, PendingGradients, compute
from penstock.engine.memory import MemoryAccount
from penstock.engine.product_choices import SparseProducts
from penstock.engine.slots import Arrived
from penstock.engine.sparse_weights import (
    EmptySparse,
    SparseWeights,
    gradient_shape,
    most_layout_bytes,
)
from penstock.engine.torch_engine import TorchEngine
from penstock.program import Kind, Program, TensorSpec, WeightSpec
from penstock.step_schedule import StepSchedule

_META = torch.device("meta")


class NullEngine(TorchEngine):
    """Accepts the weights, keeps the shapes, and returns zero gradients and a zero loss.

    `expands_sparse` says that it stands for an engine whose device expands sparse weights.
    """

    def __init__(
        self,
        program: Program,
        plan: EnginePlan,
        *,
        budget_bytes: int | None = None,
        expands_sparse: bool = False,
    ) -> None:
        super().__init__(
            _without_work(program),
            plan,
            device="meta",
            budget_bytes=budget_bytes,
            sparse=SparseWeights(SparseProducts()),
        )
        self.plan, self.expands_sparse = plan, expands_sparse
        kept = most_bitmap_bytes if expands_sparse else most_layout_bytes
        self._most_layout_bytes = kept(program)

    def losses(self) -> list[float]:
        """Return a loss of zero per micro-batch."""
        return [0.0] * len(self._losses)

    def is_finite(self, stage: int) -> bool:
        """Return true: nothing is computed, so nothing is infinite."""
        return True

    def _prepared(self, weight: Any) -> Any:
        if isinstance(weight, torch.Tensor):
            return weight
        return _GradientShape(gradient_shape(weight))

    def _kept_layout_bytes(self) -> int:
        return self._most_layout_bytes

    def _send(self, stage: int, nodes: list[PartialSum]) -> PendingGradients:
        zeros = [
            PartialSum(
                node.level,
                node.index,
                tuple(
                    None if t is None else torch.zeros((), dtype=t.dtype).expand(t.shape)
                    for t in node.tensors
                ),
            )
            for node in nodes
        ]
        return Arrived(zeros)


def dry_run(
    program: Program, micro_batches: int, plan: EnginePlan, expands_sparse: bool = False
) -> MemoryAccount:
    """Run one step of the null engine and return its memory account."""
    engine = NullEngine(program, plan, expands_sparse=expands_sparse)
    run_step(engine, micro_batches)
    return engine.memory


def run_step(engine: NullEngine, micro_batches: int) -> None:
    """Run one step of a null engine."""
    program, plan, expands_sparse = engine.program, engine.plan, engine.expands_sparse
    inputs = {
        name: _empty(program.values[name].tensor)
        for name in program.inputs
        if name in program.values
    }
    batch = [
        {
            n: inputs[n].clone() if n in inputs else torch.empty(0, device=_META)
            for n in program.inputs
        }
        for _ in range(micro_batches)
    ]
    engine.begin(Batch(batch, 0, micro_batches, 0, 0))
    if any(program.stages[-1].kind.outputs_grad):
        schedule = StepSchedule.of(program, plan.recompute, plan.dense_gradients)
    else:
        schedule = StepSchedule.forward_only(program)
    for operation in schedule.operations:
        dense = operation.dense_gradients
        weights: list[Any] = [
            _empty_weight(program.weights[name], name in dense, expands_sparse)
            for name in operation.weights
        ]
        engine.load(operation.stage, weights)
        compute(engine, operation)


def _empty_weight(
    spec: WeightSpec, dense_gradient: bool, is_expanded: bool
) -> torch.Tensor | EmptySparse:
    if spec.is_sparse:
        return EmptySparse.of(spec, dense_gradient, is_expanded)
    return _empty(TensorSpec(spec.shape, spec.stream_dtype))


@dataclasses.dataclass(frozen=True)
class _GradientShape:
    """A sparse weight in a call that computes nothing."""

    shape: tuple[int, ...]


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=_META)


def _without_work(program: Program) -> Program:
    kinds: dict[str, Kind] = {}
    for stage in program.stages:
        if stage.kind.digest not in kinds:
            kinds[stage.kind.digest] = _null_kind(stage.kind)
    return dataclasses.replace(
        program,
        stages=tuple(dataclasses.replace(s, kind=kinds[s.kind.digest]) for s in program.stages),
        constants={n: _empty(program.values[n].tensor) for n in program.constants},
        prelude=_returning([program.values[n].tensor for n in program.prelude_outputs])
        if program.prelude is not None
        else None,
    )


def _null_kind(kind: Kind) -> Kind:
    first, last = len(kind.weights), len(kind.weights) + len(kind.inputs)

    def forward(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = args[first:last]
        saved = [
            _empty(TensorSpec((s.bytes,), torch.uint8)) if s.view_of is None else inputs[s.view_of]
            for s in kind.saved
            if s.input is None
        ]
        return (*map(_empty, kind.outputs), *saved)

    everything = range(len(kind.weights))
    return dataclasses.replace(
        kind,
        forward=forward,
        infer=_returning(kind.outputs),
        backward=_returning_gradients(kind, (), kind.backward_weights),
        recompute=_returning_gradients(kind, (), everything),
        turn=_returning_gradients(kind, kind.outputs, everything),
    )


def _returning(specs: Sequence[TensorSpec]) -> Callable[..., tuple[torch.Tensor, ...]]:
    return lambda *_: tuple(_empty(spec) for spec in specs)


def _returning_gradients(
    kind: Kind, before: Sequence[TensorSpec], positions: Sequence[int]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a call that returns `before` and the gradients of inputs and weights.

    Its first arguments are the weights at `positions`.
    """
    inputs = [spec for spec, grad in zip(kind.inputs, kind.inputs_grad, strict=True) if grad]
    trained = [place for place, grad in enumerate(kind.trainable) if grad]

    def call(*args: Any) -> tuple[torch.Tensor, ...]:
        weights = dict(zip(positions, args, strict=False))
        gradients = [
            TensorSpec(weights[place].shape, torch.float32)
            if place in kind.sparse
            else kind.weights[place]
            for place in trained
        ]
        return tuple(map(_empty, (*before, *inputs, *gradients)))

    return call
