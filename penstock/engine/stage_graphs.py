"""What is read from the graphs of a stage's executables: the weights and the operators."""

import torch
from torch import fx

from penstock.program import Kind

HEAD = "linear_cross_entropy"
"""The beginning of the names of a fused head's operators."""

_VIEWS = {
    *("t", "transpose", "permute", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze"),
    *("contiguous", "clone", "_to_copy", "detach", "alias"),
}


def weights_and_tangents(kind: Kind, executable: str) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the placeholders of weights, and of the outputs' gradients."""
    places = kind.graphs[executable].find_nodes(op="placeholder")
    count, gradients = len(kind.weights), sum(kind.outputs_grad)
    if executable == "backward":
        count = len(kind.backward_weights)
        return set(places[:count]), set(places[len(places) - 1 - gradients : -1])
    if executable in ("recompute", "turn"):
        return set(places[:count]), set(places[len(places) - gradients :])
    return set(places[:count]), set()


def source_of(node: fx.Node) -> fx.Node:
    """Return what a node is a view or a copy of."""
    while node.op == "call_function" and operator_name(node) in _VIEWS:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def operator_name(node: fx.Node) -> str:
    """Return the name of the operator, or of the function, that a node calls."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2]
    return getattr(target, "__name__", "")
