"""Nodes of a captured graph: results, source in the user's code, new nodes, unused nodes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from penstock.compiler.tensors import tensors_in


def value_of(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor that a node computes."""
    return node.meta["val"]


def source_line(node: fx.Node) -> str:
    """Return the source of a node in the user's model: module path, and file and line if known."""
    stack = node.meta.get("nn_module_stack", {})
    path = list(stack.values())[-1][0] if stack else ""
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    places = [line for line in trace if line.startswith("File ") and "/torch/" not in line]
    line = f" at {places[-1]}" if places else ""
    return f"{path or 'the model'}{line}"


def insert_call(
    graph: fx.Graph,
    like: fx.Node,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """Insert an operator with the same source position as `like`."""
    node = graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta)
    with next(tensors_in(value_of(like))).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = target(
            *fx.node.map_arg(args, value_of), **fx.node.map_arg(kwargs or {}, value_of)
        )
    return node


def erase_unused(graph: fx.Graph) -> None:
    """Erase the nodes whose results nothing reads, as `fx.Graph.eliminate_dead_code` does.

    That method first checks the whole graph, and asks of every node whether it has an effect. This
    function asks it of nodes without readers only.
    """
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def arguments_by_name(node: fx.Node) -> dict[str, Any]:
    """Return an operator's arguments by their schema names."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [a.name for a in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
