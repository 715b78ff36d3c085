"""Which values an engine keeps and which it recomputes, decided before the first step.

The prediction uses no separate formula that could drift from the engine: it runs a step of the
engine's own code on tensors without memory, and reads the memory account (`step_memory.py`).
"""

import bisect
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.config import size_above
from penstock.engine.interface import SLOTS, EnginePlan
from penstock.engine.sharing import Sharing, largest_slot
from penstock.engine.step_memory import StepMemory
from penstock.engine.targets import target_of
from penstock.errors import BudgetError
from penstock.program import Program, Stage, largest_stage

_TIMES = 8  # number of micro-batches tried next, relative to the last


@dataclass(frozen=True)
class Prediction:
    """The peak of an engine's memory over one step, and the stage that reaches it."""

    peak_bytes: int
    stage: str


def predict_bytes(
    program: Program,
    micro_batches: int,
    plan: EnginePlan,
    device: str = "cpu",
    sharing: Sharing | None = None,
) -> Prediction:
    """Return the engine bytes of one step over `micro_batches` micro-batches.

    `sharing` is the sharing of the engine's group of devices, if it belongs to one.
    """
    target = target_of(device)
    peak_bytes, stage = _peak(program, micro_batches, plan, target.expands_sparse)
    if sharing is not None:
        held = sharing.device_bytes(program, plan.slots)
        return Prediction(peak_bytes + held, stage)
    # Slots on a device are allocated permanently, including the slot of the computing stage.
    if target.has_own_memory:
        slots, size = plan.slots, largest_slot(program)
    else:
        slots, size = plan.slots - 1, largest_stage(program, lambda weight: weight.stream_bytes)[1]
    waiting = size * slots
    return Prediction(peak_bytes + waiting + plan.beside_bytes, stage)


_Step = tuple[EnginePlan, bool]
_steps: dict[int, tuple[weakref.ref[Program], dict[_Step, StepMemory]]] = {}  # by id


def _forget(steps: dict[int, Any], number: int, _: weakref.ref[Program]) -> None:
    # `steps` is given: at the end of the process the module's names go before the program does.
    steps.pop(number, None)


def _peak(
    program: Program, micro_batches: int, plan: EnginePlan, expands_sparse: bool
) -> tuple[int, str]:
    """Return the peak of a dry run and its stage; equal steps are recorded once."""
    of, known = _steps.get(id(program), (None, {}))
    if of is None or of() is not program:
        number = id(program)
        of = weakref.ref(program, functools.partial(_forget, _steps, number))
        _, known = _steps[number] = (of, {})
    # What is beside computation and the number of slots are no part of a dry run.
    step = replace(plan, beside_bytes=0, slots=SLOTS), expands_sparse
    if step not in known:
        known[step] = StepMemory(program, *step)
    return known[step].peak(micro_batches)


def bytes_of_choice(
    program: Program,
    micro_batches: int,
    recompute: Literal["auto", "always", "never"] = "auto",
    device: str = "cpu",
    sharing: Sharing | None = None,
    beside_bytes: int = 0,
    dense_gradients: bool = False,
) -> tuple[int, int]:
    """Return the minimum engine bytes of a step, and the bytes without any recomputation."""
    nothing = EnginePlan(beside_bytes=beside_bytes, dense_gradients=dense_gradients)
    everything = replace(nothing, recompute=frozenset(_by_value(program.stages)))
    frugal = nothing if recompute == "never" else everything
    lavish = everything if recompute == "always" else nothing
    return (
        predict_bytes(program, micro_batches, frugal, device, sharing).peak_bytes,
        predict_bytes(program, micro_batches, lavish, device, sharing).peak_bytes,
    )


def can_fit(
    program: Program,
    micro_batches: int,
    budget_bytes: int,
    recompute: Literal["auto", "always", "never"] = "auto",
    device: str = "cpu",
    dense_gradients: bool = False,
) -> bool:
    """Return whether one engine can compute a step of so many micro-batches within a budget.

    Bytes grow with micro-batches. Fewer micro-batches are tried first, so that a step far above the
    budget costs little time.
    """
    stages = () if recompute == "never" else _by_value(program.stages)
    plan, tried = EnginePlan(frozenset(stages), dense_gradients=dense_gradients), 1
    while (
        predict_bytes(program, min(tried, micro_batches), plan, device).peak_bytes <= budget_bytes
    ):
        if tried >= micro_batches:
            return True
        tried *= _TIMES
    return False


def least_kept_bytes(program: Program, micro_batches: int) -> int:
    """Return a lower bound on the bytes that an engine keeps of a step for its backward sweep.

    A stage keeps its inputs, or what it saves instead. These bytes grow with the samples of the
    step, however they are divided into micro-batches: a step that does not fit for this reason does
    not fit with smaller micro-batches.
    """
    counted: set[str] = set()
    total = 0
    for stage in program.stages[:-1]:
        inputs = {
            position: program.values[name].bytes
            for position, name in enumerate(stage.inputs)
            if program.values[name].source == "stage" and name not in counted
        }
        counted.update(stage.inputs)
        held = {s.input if s.view_of is None else s.view_of for s in stage.kind.saved}
        saved = sum(size for position, size in inputs.items() if position in held)
        total += min(sum(inputs.values()), stage.kind.saved_bytes + saved)
    return micro_batches * total


def plan_engine(
    program: Program,
    micro_batches: int,
    budget_bytes: int | None,
    recompute: Literal["auto", "always", "never"] = "auto",
    device: str = "cpu",
    sharing: Sharing | None = None,
    beside_bytes: int = 0,
    dense_gradients: bool = False,
    engines: int = 1,
) -> EnginePlan:
    """Choose the stages to recompute so that a step fits the budget.

    Stages that free the most bytes per repeated operation are chosen first, and no more than
    needed. `dense_gradients` says that some steps compute the gradient of every element of sparse
    weights. `engines` share the batch; each has up to `micro_batches` of it.

    **Raises:** `BudgetError` naming the stage at the peak and the minimum budget.
    """

    def checked(plan: EnginePlan) -> EnginePlan:
        return _checked(program, micro_batches, plan, budget_bytes, device, sharing, engines)

    def fits(plan: EnginePlan) -> bool:
        found = predict_bytes(program, micro_batches, plan, device, sharing)
        return budget_bytes is None or found.peak_bytes <= budget_bytes

    candidates = _by_value(program.stages)
    nothing = EnginePlan(beside_bytes=beside_bytes, dense_gradients=dense_gradients)
    everything = replace(nothing, recompute=frozenset(candidates))
    if recompute == "always":
        return checked(everything)
    if recompute == "never":
        return checked(nothing)
    if budget_bytes is None:
        return nothing
    if fits(nothing):
        return nothing
    checked(everything)
    low, high = 0, len(candidates)  # the first `high` fit, the first `low` do not
    while high - low > 1:
        middle = (low + high) // 2
        if fits(replace(nothing, recompute=frozenset(candidates[:middle]))):
            high = middle
        else:
            low = middle
    return replace(nothing, recompute=frozenset(candidates[:high]))


def _by_value(stages: Sequence[Stage]) -> list[int]:
    """Order all stages but the last by bytes freed per repeated operation, best first."""
    useful = [s for s in stages[:-1] if s.kind.saved_bytes > 0]
    return [
        s.index
        for s in sorted(useful, key=lambda s: -s.kind.saved_bytes / (1 + s.kind.forward_flops))
    ]


def _checked(
    program: Program,
    micro_batches: int,
    plan: EnginePlan,
    budget_bytes: int | None,
    device: str,
    sharing: Sharing | None,
    engines: int,
) -> EnginePlan:
    if budget_bytes is None:
        return plan
    found = predict_bytes(program, micro_batches, plan, device, sharing)
    if found.peak_bytes > budget_bytes:
        beside = ""
        if plan.beside_bytes:
            beside = f" ({size_above(plan.beside_bytes)} of it for transfer buffers)"
        need = size_above(found.peak_bytes)
        many = "micro-batch" if micro_batches == 1 else "micro-batches"
        lower = "batch.micro, batch.size or data.sequence_length"
        if program.micro_batch == 1:
            lower = "data.sequence_length"
            fitting = _most_that_fit(program, micro_batches, plan, budget_bytes, device, sharing)
            if fitting:
                lower = f"batch.size to {fitting * engines} or data.sequence_length"
        raise BudgetError(
            f"the engine needs {need} for a step of {micro_batches} {many}{beside}, the budget is "
            f"{size_above(budget_bytes)}; the peak is at stage {found.stage}. Raise engine.memory "
            f"to at least {need}, or lower {lower}."
        )
    return plan


def _most_that_fit(
    program: Program,
    micro_batches: int,
    plan: EnginePlan,
    budget_bytes: int,
    device: str,
    sharing: Sharing | None,
) -> int:
    """Return the most micro-batches of an engine, fewer than `micro_batches`, that fit a budget."""

    def need(count: int) -> int:
        # Devices of a group share no more micro-batches than they have together.
        of = sharing and replace(sharing, micro_batches=count * sharing.devices)
        return predict_bytes(program, count, plan, device, of).peak_bytes

    return bisect.bisect_right(range(1, micro_batches), budget_bytes, key=need)
