"""The weights of a stage's language-model heads at one step.

The costs of a head hold neither the shape of its weight nor the entries of a sparse one: both are
read from the graph of the executable.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import fx

from penstock.engine.stage_graphs import HEAD, operator_name, source_of
from penstock.program import Kind
from penstock.wafer.closed_form import HeadShape

_WITH_WEIGHT = 6  # the place of `with_weight` among the arguments of a head's backward


@dataclass(frozen=True, order=True)
class MaskState:
    """A sparse weight at one step.

    Attributes:
        kept: its entries.
        dense_gradient: whether the gradient of every element is computed, for a change of masks.
    """

    kept: int
    dense_gradient: bool = False


def heads_of(kind: Kind, executable: str, masks: Mapping[int, MaskState]) -> tuple[HeadShape, ...]:
    """Return the weights of the heads in one executable of a kind, in the order of their nodes.

    Args:
        masks: the sparse weights, by their position in the kind; of one that is missing, the most
            entries count.
    """
    graph = kind.graphs[executable]
    positions = _positions(kind, executable, graph)
    return tuple(
        _head(kind, node, positions, masks)
        for node in graph.nodes
        if node.op == "call_function" and operator_name(node).startswith(HEAD)
    )


def _positions(kind: Kind, executable: str, graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the position in the kind of each placeholder of a weight."""
    weights = kind.backward_weights if executable == "backward" else range(len(kind.weights))
    return dict(zip(graph.find_nodes(op="placeholder"), weights, strict=False))


def _head(
    kind: Kind, node: fx.Node, positions: Mapping[fx.Node, int], masks: Mapping[int, MaskState]
) -> HeadShape:
    is_backward = operator_name(node).endswith(("_backward", "_turn"))
    weight = node.args[2 if is_backward else 1]
    assert isinstance(weight, fx.Node)
    outputs, inputs = weight.meta["val"].shape
    elements = math.prod((outputs, inputs))
    trained = not is_backward or bool(node.args[_WITH_WEIGHT])
    gradient: Literal["kept", "all", "none"] = "kept" if trained else "none"
    position = positions.get(source_of(weight))
    use = None if position is None else kind.sparse.get(position)
    if position is None or use is None:
        return HeadShape(outputs, inputs, elements, elements, gradient=gradient)
    state = masks.get(position, MaskState(use.capacity))
    if trained and state.dense_gradient:
        gradient = "all"
    return HeadShape(outputs, inputs, use.capacity, state.kept, is_sparse=True, gradient=gradient)
