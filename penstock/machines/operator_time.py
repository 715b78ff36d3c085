"""How long an engine takes for an operator, and for the sum of its micro-batches' gradients."""

from __future__ import annotations

from penstock.machines.description import EnginePart
from penstock.machines.rates import IN_FLOPS, RateCurve
from penstock.operator_cost import OperatorCost


def operator_seconds(cost: OperatorCost, engine: EnginePart) -> float:
    """Return the time of all calls of an operator, of one micro-batch.

    An operator takes the time of its arithmetic or that of its traffic, whichever is longer. That
    is its time where it is repeated alone; `EnginePart.in_step` says how much longer it takes in a
    step.
    """
    curve = engine.speed.curve(cost.work, cost.dtype, cost.layout)  # type: ignore[arg-type]
    rate = curve.at(_size_on(curve, cost))
    seconds = (cost.flops if curve.work in IN_FLOPS else cost.bytes) / rate
    if curve.work in IN_FLOPS:
        memory = engine.speed.curve("pointwise", cost.dtype)
        largest = memory.at(float("inf"))
        seconds = max(seconds, cost.bytes / largest)
    return cost.calls * (seconds * engine.in_step(cost.dtype) + engine.operator_seconds)


def _size_on(curve: RateCurve, cost: OperatorCost) -> float:
    """Return the size of an operator in the unit of a curve, which may be that of other work.

    The share of kept entries of a sparse product is no dimension: on a curve of products its size
    is the smallest of its tokens and of the sides of its weight, or the largest of the curve if the
    cost does not name the weight. A sequence's length and the tokens of a head are dimensions of
    their products; the others are not among the costs.
    """
    if cost.work != "sparse product" or curve.work == "sparse product":
        return cost.size
    kept = cost.size * cost.outputs * cost.inputs
    if not kept:
        return curve.sizes[-1]
    return min(cost.outputs, cost.inputs, cost.flops / (2 * kept))


def sum_seconds(
    gradient_bytes: int, narrow_bytes: int, micro_batches: int, engine: EnginePart
) -> float:
    """Return the time in which an engine adds the gradients of its micro-batches, in float32.

    Of each sum of two, both are read and one is written. Gradients of bfloat16 are converted
    before.

    Args:
        gradient_bytes: of the sum.
        narrow_bytes: the part of the sum whose terms are bfloat16.
        micro_batches: how many terms the sum has.
        engine: the engine.
    """
    if micro_batches < 2:
        return 0.0
    seconds = 0.0
    if gradient_bytes:
        moved = 3 * gradient_bytes
        rate = engine.speed.curve("pointwise", "float32").at(moved)
        seconds += (micro_batches - 1) * moved / rate
    if narrow_bytes:
        moved = narrow_bytes // 2 + narrow_bytes
        seconds += micro_batches * moved / engine.speed.curve("copy", "bfloat16").at(moved)
    return seconds
