"""The shapes of weights, from the costs of their products that the compiler counts.

The costs of a product hold its operations, its bytes and the number of its calls, not its shape.
With the tokens of the stage, the shape follows: a product of T tokens with a weight [M, K] has
2 T K M operations and reads and writes T (K + M) + K M elements, and M more with a bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.operator_cost import OperatorCost

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
_TARGET_BYTES = 8


@dataclass(frozen=True)
class WeightShape:
    """Features of a product's weight.

    Attributes:
        has_bias: whether the costs include a bias, which only a forward product has.
        is_exact: whether the counts of the compiler fit a product of such a shape.
    """

    outputs: int
    inputs: int
    has_bias: bool = False
    is_exact: bool = True


@dataclass(frozen=True)
class HeadShape:
    """The weight of a language-model head, which the costs of a head do not describe if it is
    sparse.

    Attributes:
        outputs: labels.
        inputs: hidden features.
        capacity: entries that the compiler counts; all of a dense weight.
        kept: entries that the weight has now.
        is_sparse: whether its entries travel with indices.
        gradient: of which elements the weight's gradient is computed: those that are kept, all, or
            none.
    """

    outputs: int
    inputs: int
    capacity: int
    kept: int
    is_sparse: bool = False
    gradient: Literal["kept", "all", "none"] = "kept"

    @classmethod
    def dense(cls, outputs: int, inputs: int) -> HeadShape:
        """Return the shape of a trained weight that keeps all entries."""
        return cls(outputs, inputs, outputs * inputs, outputs * inputs)


def weight_shape(cost: OperatorCost, tokens: int) -> WeightShape:
    """Return the shape of the weight of a product, from its operations and bytes.

    Without a bias the costs are the same with both sides exchanged; the larger side is taken for
    the outputs, which has more partial sums.
    """
    kept = cost.flops / (2 * tokens)
    density = cost.size if cost.work == "sparse product" else 1.0
    weights = round(kept / density)
    moved = cost.bytes
    if cost.name == "sparse_weight_gradient":
        moved -= 4 * round(kept)  # the gradients of kept entries are float32
    elements = moved / ELEMENT_BYTES.get(cost.dtype, 4) - weights
    # T (K + M) + M, with K M known, is a quadratic equation for M.
    for bias in (0, 1):
        found = _roots(tokens + bias, -elements, tokens * weights)
        for outputs in found:
            inputs, rest = divmod(weights, outputs)
            exact = not rest and tokens * (inputs + outputs) + bias * outputs == elements
            if exact:
                return WeightShape(outputs, inputs, bool(bias))
    side = max(1, math.isqrt(max(weights, 1)))
    return WeightShape(side, max(1, round(weights / side)), is_exact=False)


def head_shape(cost: OperatorCost, heads: Iterable[HeadShape], width: int) -> HeadShape:
    """Return the weight of a head: the one of `heads` that has as many operations as the cost; with
    none, that of a dense weight without bias, from the operations and bytes.

    Args:
        width: bytes of a number.
    """
    is_backward, tokens = is_backward_head(cost), round(cost.size)
    weights = cost.flops // ((3 if is_backward else 1) * 2 * tokens)
    for head in heads:
        if head.capacity == weights:
            return head
    # Backward reads what forward reads, and writes as much: the gradients.
    moved = (cost.bytes - _TARGET_BYTES * tokens) / width / (2 if is_backward else 1)
    inputs = max(1, round((moved - weights) / tokens))
    outputs = max(1, round(weights / inputs))
    return HeadShape.dense(outputs, inputs)


def is_backward_head(cost: OperatorCost) -> bool:
    """Return whether the cost of a head includes the gradients."""
    return "backward" in cost.name or "turn" in cost.name


def _roots(a: int, b: float, c: float) -> list[int]:
    """Return the whole positive numbers next to the roots of a x^2 + b x + c, the largest first."""
    inner = b * b - 4 * a * c
    if inner < 0:
        return []
    root = math.sqrt(inner)
    near = {round((-b + sign * root) / (2 * a)) for sign in (1, -1)}
    return sorted((value for value in near if value > 0), reverse=True)
