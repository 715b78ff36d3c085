"""Values that a backward recomputes instead of keeping: each costs one pass over memory.

A third of a block's activations that the backward reads are results of norms, activation functions
and casts of other values that the backward also reads. Keeping only these other values costs no
matrix product, and no bit, since the same operator runs on the same values. Source of the idea:
Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, section 3. Here it applies to
every cheap value, independent of the recomputation of whole stages.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Operators with a few operations per element that they read or write.
_CHEAP = {
    aten._to_copy.default,
    aten.add.Scalar,
    aten.add.Tensor,
    aten.clone.default,
    aten.div.Scalar,
    aten.div.Tensor,
    aten.gelu.default,
    aten.leaky_relu.default,
    aten.mean.dim,
    aten.mul.Scalar,
    aten.mul.Tensor,
    aten.native_layer_norm.default,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.relu.default,
    aten.rsqrt.default,
    aten.sigmoid.default,
    aten.silu.default,
    aten.sub.Tensor,
    aten.tanh.default,
    operator.getitem,
}


def keep_costly(wanted: Sequence[fx.Node], free: set[fx.Node]) -> list[fx.Node]:
    """Return those of the `wanted` values that must be kept, so that all can be computed.

    **Arguments:** `wanted`, in the order of the graph; `free`, the values that a backward has
    without keeping them: weights, values computed from weights, and inputs that it reads.
    """
    kept = set(wanted)
    for node in reversed(wanted):
        kept.discard(node)
        if not _can_be_made(node, kept, free):
            kept.add(node)
    return [node for node in wanted if node in kept]


def _can_be_made(node: fx.Node, kept: set[fx.Node], free: set[fx.Node]) -> bool:
    """Return whether cheap operators compute a node from the values in `kept` and `free`."""
    seen, to_visit = {node}, [node]
    while to_visit:
        current = to_visit.pop()
        if current in kept or current in free:
            continue
        if current.target not in _CHEAP and not _is_view(current.target):
            return False
        new = [source for source in current.all_input_nodes if source not in seen]
        seen.update(new)
        to_visit += new
    return True


def _is_view(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in target._schema.arguments
    )


def make_late(graph: fx.Graph, given: Sequence[str]) -> fx.Graph:
    """Move nodes that do not depend on the placeholders named `given` directly before their first
    user.

    A recomputed value then does not wait in memory for its reader.
    """
    bound = {node for node in graph.nodes if node.op == "placeholder" and node.name in given}
    remade: list[fx.Node] = []
    for node in graph.nodes:
        if any(source in bound for source in node.all_input_nodes):
            bound.add(node)
        elif node.op == "call_function":
            remade.append(node)
    for node in reversed(remade):
        min(node.users).prepend(node)
    return graph
