"""The weights of products and of language-model heads, from the costs that the compiler counts.

The costs of a product have the sides of its weight; those of a head have its operations and bytes
alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.operator_cost import OperatorCost

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
_TARGET_BYTES = 8


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


def streams_weight(cost: OperatorCost, tokens: int) -> bool:
    """Return whether an operator is a product of all tokens of a stage with a weight. Products of
    other tokens, such as those of an expert, and of activations alone are not."""
    kept = cost.outputs * cost.inputs
    if cost.work == "sparse product":
        kept = round(cost.size * kept)
    return bool(cost.form) and cost.flops == 2 * tokens * kept


def head_shape(cost: OperatorCost, heads: Iterable[HeadShape], width: int) -> HeadShape:
    """Return the weight of a head: the one of `heads` that has as many operations as the cost; with
    none, that of a dense weight without bias, from the operations and bytes.

    Args:
        width: bytes of a number.
    """
    is_backward, tokens = is_backward_head(cost), round(cost.size)
    for head in heads:
        gradients = 1 if head.gradient == "none" else 2
        if cost.flops == (1 + gradients * is_backward) * 2 * tokens * head.capacity:
            return head
    weights = cost.flops // ((3 if is_backward else 1) * 2 * tokens)
    # Backward reads what forward reads, and writes as much: the gradients.
    moved = (cost.bytes - _TARGET_BYTES * tokens) / width / (2 if is_backward else 1)
    inputs = max(1, round((moved - weights) / tokens))
    outputs = max(1, round(weights / inputs))
    return HeadShape.dense(outputs, inputs)


def is_backward_head(cost: OperatorCost) -> bool:
    """Return whether the cost of a head includes the gradients."""
    return "backward" in cost.name or "turn" in cost.name
