"""A step of a small transformer, against the times of its operators alone.

Operators that are repeated alone find their operands in a cache and the processor's threads awake.
In a step they follow other operators. How much longer, or shorter, that makes them is measured on
one model, by type; its sweeps run on the engine as those of a run do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from penstock.calibration.repetitions import Case, Prepared, Quantity
from penstock.compiler import CompileOptions, Precision, Products, compile_module
from penstock.engine import Batch, EnginePlan, compute, target_of
from penstock.machines import EnginePart, operator_seconds, sum_seconds
from penstock.program import Program
from penstock.step_schedule import StepSchedule, narrow_gradient_bytes

STEP = "reference step"
"""The work of the cases: steps of the reference model."""

_WIDTH, _HEADS, _BLOCKS, _VOCABULARY = 512, 8, 2, 4096
_SEQUENCES, _LENGTH, _MICRO_BATCHES = 4, 256, 2
_PRECISIONS: Mapping[str, Precision] = {"float32": "fp32", "bfloat16": "bf16"}
"""By type of operators; a step in bf16 has some of float32 too, whose ratio comes first."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attention = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.projection = nn.Linear(_WIDTH, _WIDTH)
        self.wide, self.narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        query, key, value = (
            part.view(rows, length, _HEADS, -1).transpose(1, 2)
            for part in self.attention(self.first_norm(x)).split(_WIDTH, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(rows, length, _WIDTH))
        hidden = functional.gelu(self.wide(self.second_norm(x)), approximate="tanh")
        return x + self.narrow(hidden)


class _Model(nn.Module):
    """A GPT of few layers; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.places = nn.Parameter(torch.zeros(_LENGTH, _WIDTH))
        self.blocks = nn.ModuleList(_Block() for _ in range(_BLOCKS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, _VOCABULARY), labels.view(-1))


@functools.cache
def reference_program(dtype: str, products: Products) -> Program:
    """Return the program of the reference model for one micro-batch, of a type of operators."""
    model, rows = _Model(), torch.zeros(_SEQUENCES, _LENGTH, dtype=torch.int64)
    options = CompileOptions(precision=_PRECISIONS[dtype], products=products)
    with torch.enable_grad():
        return compile_module(
            model, {"tokens": rows, "labels": rows}, options, name="reference", buffers=dict
        )


def reference_cases(products: Products) -> Iterator[Case]:
    """Yield a step of the reference model for each type, in steps per second."""
    for dtype in _PRECISIONS:
        yield Case(Quantity("engine", STEP, dtype), functools.partial(_prepared, dtype, products))


def _prepared(dtype: str, products: Products) -> Prepared:
    return Prepared(reference_step(reference_program(dtype, products)), 1.0)


def reference_step(program: Program) -> Callable[[], list[float]]:
    """Return a function that runs both sweeps of a step and returns the losses."""
    engine = target_of("cpu").make_engine(program, EnginePlan())
    schedule = StepSchedule.of(program)
    random = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(weight.shape, generator=random).mul_(0.02).to(weight.stream_dtype)
        for name, weight in program.weights.items()
    }
    batches = [
        {
            name: torch.randint(_VOCABULARY, (_SEQUENCES, _LENGTH), generator=random)
            for name in ("tokens", "labels")
        }
        for _ in range(_MICRO_BATCHES)
    ]

    def run() -> list[float]:
        engine.begin(Batch(batches, 0, _MICRO_BATCHES, 0, 0))
        for operation in schedule.operations:
            engine.load(operation.stage, [weights[name] for name in operation.weights])
            pending = compute(engine, operation)
            if pending is not None:
                pending.wait()
        return engine.losses()

    return run


@dataclass(frozen=True)
class StepTimes:
    """The seconds of a step's operators alone, by type, and of all that the step does besides."""

    operators: Mapping[str, float]
    besides: float


def times_alone(program: Program, engine: EnginePart) -> StepTimes:
    """Return the times of a reference step's parts on an engine, each of them alone.

    `engine` has no ratios yet.
    """
    seconds = dict.fromkeys(_PRECISIONS, 0.0)
    besides = 0.0
    for operation in StepSchedule.of(program).operations:
        narrow = narrow_gradient_bytes(program, operation)
        besides += sum_seconds(operation.gradient_bytes, narrow, _MICRO_BATCHES, engine)
        besides += _MICRO_BATCHES * engine.stage_seconds
        for cost in program.stages[operation.stage].kind.costs[operation.sweep]:
            calls = cost.calls * engine.operator_seconds
            besides += _MICRO_BATCHES * calls
            dtype = cost.dtype if cost.dtype in seconds else "float32"
            seconds[dtype] += _MICRO_BATCHES * (operator_seconds(cost, engine) - calls)
    return StepTimes(seconds, besides)


def ratios_in_step(
    engine: EnginePart, products: Products, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return how long operators take in a step, over their time alone, by type.

    Args:
        engine: the engine, which has no ratios yet.
        products: the library of large products.
        seconds: of a reference step, by type; a type that is missing gets no ratio.
    """
    ratios: dict[str, float] = {}
    for dtype in seconds:
        alone = times_alone(reference_program(dtype, products), engine)
        others = sum(
            ratios.get(other, 1.0) * time
            for other, time in alone.operators.items()
            if other != dtype
        )
        own = seconds[dtype] - alone.besides - others
        if own > 0:  # else the measurement of the calls was disturbed
            ratios[dtype] = own / alone.operators[dtype]
    return ratios
