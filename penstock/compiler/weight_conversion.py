"""Conversion of a weight that is streamed in another type than it is computed in.

Values that depend on weights alone are never saved for a backward (`joint.py`): they are recomputed
from the weight, which is streamed again.
"""

import torch
from torch import fx

aten = torch.ops.aten


def open_weight(graph: fx.Graph, weight: fx.Node, dtype: torch.dtype) -> None:
    """Make all readers of the placeholder `weight` of a stage's graph read its values as `dtype`.

    If rows of a table are looked up, only these rows are converted.
    """
    readers = list(weight.users)
    lookups = [node for node in readers if _looks_up(node, weight)]
    for lookup in lookups:
        followers = list(lookup.users)
        with graph.inserting_after(lookup):
            rows = graph.call_function(aten._to_copy.default, (lookup,), {"dtype": dtype})
        for follower in followers:
            follower.replace_input_with(lookup, rows)
    others = [node for node in readers if node not in lookups]
    if not others:
        return
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        opened = graph.call_function(aten._to_copy.default, (weight,), {"dtype": dtype})
    for node in others:
        node.replace_input_with(weight, opened)


def _looks_up(node: fx.Node, weight: fx.Node) -> bool:
    is_lookup = node.target is aten.embedding.default and node.args[0] is weight
    return is_lookup and weight not in node.args[1:]
