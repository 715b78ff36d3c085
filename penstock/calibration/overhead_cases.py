"""The time that calls take besides their work, as cases: of an operator, and of a stage.

Operators on tiny tensors take no time of their own. The stages of the tiny program here compute
nothing: all of their time is the engine's.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from penstock.calibration.operator_cases import Operand, traced
from penstock.calibration.repetitions import Case, Prepared, Quantity
from penstock.engine import Batch, EnginePlan, compute, target_of
from penstock.program import Kind, Program, SavedTensor, Stage, TensorSpec, ValueSpec, WeightSpec
from penstock.step_schedule import StepSchedule
from penstock.weight_formats import format_of

OPERATOR_CALL, STAGE_CALL = "operator call", "stage call"

_OPERATORS = 96  # a multiple of 3
_STAGES, _MICRO_BATCHES = 6, 4
_TINY = TensorSpec((4, 4), torch.float32)


def overhead_cases() -> Iterator[Case]:
    """Yield the calls of an operator, and of a stage for one micro-batch in one sweep."""
    yield Case(Quantity("engine", OPERATOR_CALL), _prepare_operators)
    yield Case(Quantity("engine", STAGE_CALL), _prepare_stages)


def _prepare_operators() -> Prepared:
    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(_OPERATORS // 3):
            x = torch.mm(x + y, y) * y
        return x

    operands = (Operand(_TINY.shape, _TINY.dtype),) * 2
    graph = traced(chain, operands, "torch")
    executable = fx.GraphModule(torch.nn.Module(), graph)
    tensors = [torch.zeros(_TINY.shape) for _ in operands]
    return Prepared(lambda: executable(*tensors), _OPERATORS)


def _prepare_stages() -> Prepared:
    program = empty_program()
    engine = target_of("cpu").make_engine(program, EnginePlan())
    schedule = StepSchedule.of(program)
    weights = [torch.zeros(_TINY.shape) for _ in range(_STAGES)]
    rows = [{"x": torch.zeros(_TINY.shape)} for _ in range(_MICRO_BATCHES)]

    def run() -> None:
        engine.begin(Batch(rows, 0, _MICRO_BATCHES, 0, 0))
        for operation in schedule.operations:
            engine.load(operation.stage, [weights[operation.stage]])
            pending = compute(engine, operation)
            if pending is not None:
                pending.wait()
        engine.losses()

    return Prepared(run, len(schedule.operations) * _MICRO_BATCHES)


def empty_program() -> Program:
    """Return a program of several stages with one weight each, which compute nothing."""
    loss = TensorSpec((), torch.float32)
    kinds = [_kind("first", _TINY, inputs_grad=False)]
    kinds += [_kind("inner", _TINY)] * (_STAGES - 2) + [_kind("last", loss)]
    names = ["x", *(f"value{number}" for number in range(_STAGES))]
    values = {
        name: ValueSpec(name, _TINY, "stage" if number else "input", bool(number))
        for number, name in enumerate(names)
    }
    values[names[-1]] = ValueSpec(names[-1], loss, "stage", True)
    weights = {
        f"weight{number}": WeightSpec(
            f"weight{number}", _TINY.shape, format_of(torch.float32), trainable=True
        )
        for number in range(_STAGES)
    }
    stages = tuple(
        Stage(
            number,
            f"stage{number}",
            kinds[number],
            (f"weight{number}",),
            (names[number],),
            (names[number + 1],),
        )
        for number in range(_STAGES)
    )
    return Program("calibration", stages, weights, values, ("x",), {}, None, (), (), (names[-1],))


def _kind(name: str, output: TensorSpec, inputs_grad: bool = True) -> Kind:
    result = torch.zeros(output.shape)
    made = (torch.zeros(_TINY.shape),) * (2 if inputs_grad else 1)

    def outputs(*_: Any) -> tuple[torch.Tensor, ...]:
        return (result,)

    def gradients(*_: Any) -> tuple[torch.Tensor, ...]:
        return made

    return Kind(
        name=name,
        digest=name,
        weights=(_TINY,),
        trainable=(True,),
        inputs=(_TINY,),
        inputs_grad=(inputs_grad,),
        outputs=(output,),
        outputs_grad=(True,),
        saved=(SavedTensor(_TINY, input=0),),
        backward_weights=(0,),
        forward=outputs,
        infer=outputs,
        backward=gradients,
        recompute=gradients,
        turn=lambda *_: (result, *made),
        draws_dropout=False,
        forward_flops=0,
        backward_flops=0,
        forward_transient_bytes=output.bytes,
        backward_transient_bytes=len(made) * _TINY.bytes,
        recompute_transient_bytes=len(made) * _TINY.bytes,
        turn_transient_bytes=output.bytes + len(made) * _TINY.bytes,
    )
