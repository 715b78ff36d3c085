"""Products of a stage with its weights: which of the three each is, and the sides of the weight.

A product of matrices does not show in which direction it goes: layers keep their weights in either
orientation. In a joint graph it does: backward depends on the gradients of outputs, forward not.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import fx

WeightForm = Literal["forward", "data gradient", "weight gradient"]
WEIGHT_FORMS = frozenset(get_args(WeightForm))
_KEY = "weight_product"
_FACTORS = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "onednn_linear": (0, 1),
    "token_linear": (0, 1),
    "sparse_linear": (0, 1),
}


@dataclass(frozen=True)
class WeightProduct:
    """A product with a weight.

    Attributes:
        form: Y = X W^T, dX = dY W, or dW = dY^T X.
        outputs, inputs: features of the weight.
    """

    form: WeightForm
    outputs: int
    inputs: int


def mark_weight_products(
    joint: fx.Graph,
    weights: Collection[fx.Node],
    data: Sequence[fx.Node],
    tangents: Sequence[fx.Node],
) -> None:
    """Note at each product of a joint graph which product with a weight it is; graphs into which
    nodes are copied keep the notes.

    **Arguments:** placeholders of the graph; `data` are the inputs, `tangents` the gradients of
    outputs.
    """
    of_data, later = descendants(joint, [*data, *tangents]), descendants(joint, tangents)
    shapes = {tuple(weight.meta["val"].shape) for weight in weights}
    for node in joint.nodes:
        found = _product(node, of_data, later, shapes)
        if found is not None:
            node.meta[_KEY] = found


def forget_weight_products(graph: fx.Graph) -> None:
    """Take the notes away, when costs are counted: a graph that is read from disk has none."""
    for node in graph.nodes:
        node.meta.pop(_KEY, None)


def weight_product_of(node: fx.Node) -> WeightProduct | None:
    """Return what `mark_weight_products` noted at a node."""
    return node.meta.get(_KEY)


def descendants(graph: fx.Graph, roots: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that depend on some of the given ones, and these."""
    found = set(roots)
    for node in graph.nodes:
        if node.op == "call_function" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _product(
    node: fx.Node,
    of_data: Collection[fx.Node],
    later: Collection[fx.Node],
    shapes: Collection[tuple[int, ...]],
) -> WeightProduct | None:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = node.target._schema.name.rpartition("::")[2]
    if name == "sparse_weight_gradient":
        x, gradient = _shape(node.args[0]), _shape(node.args[1])
        return WeightProduct("weight gradient", gradient[-1], x[-1])
    if name not in _FACTORS:
        return None
    left, right = (node.args[place] for place in _FACTORS[name])
    if left not in of_data:
        return None
    if right not in of_data:
        inner, columns = _shape(left)[-1], _shape(node)[-1]
        if left in later:
            return WeightProduct("data gradient", inner, columns)
        return WeightProduct("forward", columns, inner)
    rows, columns = _shape(node)[-2:]
    if (left in later) == (right in later) or not {(rows, columns), (columns, rows)} & set(shapes):
        return None
    sides = (rows, columns) if left in later else (columns, rows)
    return WeightProduct("weight gradient", *sides)


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
