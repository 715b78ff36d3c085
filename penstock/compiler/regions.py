"""Inline the regions that export wraps around `torch.no_grad()` and `torch.autocast(...)`.

Export keeps such a region as a call of a submodule. For a program it is only noise: the region's
operators are put in the caller's graph, and what leaves a region without gradients is detached.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from penstock.errors import CompileError


def inline_regions(module: fx.GraphModule) -> fx.Graph:
    """Return the module's graph with every wrapped region inlined, in place."""
    graph = module.graph
    again = True
    while again:
        again = False
        for node in list(graph.nodes):
            name = getattr(node.target, "__name__", "")
            if node.op != "call_function" or not name.startswith("wrap_with_"):
                continue
            if name == "wrap_with_set_grad_enabled":
                enabled, body, *args = node.args
                detach = not enabled
            elif name == "wrap_with_autocast":
                _, _, enabled, _, body, *args = node.args
                if enabled:
                    raise CompileError(
                        "the forward enters torch.autocast itself: remove it and set "
                        "precision: bf16 in the configuration instead"
                    )
                detach = False
            else:
                raise CompileError(f"the forward uses {name}, which Penstock does not compile")
            assert isinstance(body, fx.Node)
            _inline(graph, node, _graph_of(module, body), args, detach)
            again = True
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return graph


def _graph_of(module: fx.GraphModule, body: fx.Node) -> fx.Graph:
    region = module.get_submodule(str(body.target))
    assert isinstance(region, fx.GraphModule)
    return region.graph


def _inline(
    graph: fx.Graph, call: fx.Node, body: fx.Graph, args: list[object], detach: bool
) -> None:
    given = iter(args)
    made: dict[fx.Node, object] = {}
    results: tuple[object, ...] = ()
    with graph.inserting_before(call):
        for node in body.nodes:
            if node.op == "placeholder":
                made[node] = next(given)
            elif node.op == "output":
                returned = node.args[0]
                flat = returned if isinstance(returned, (tuple, list)) else (returned,)
                results = tuple(made[n] if isinstance(n, fx.Node) else n for n in flat)
            else:
                made[node] = graph.node_copy(node, lambda n: made[n])  # type: ignore[arg-type,return-value]
                made[node].meta.setdefault("nn_module_stack", call.meta.get("nn_module_stack"))  # type: ignore[attr-defined]
        if detach:
            results = tuple(_detached(graph, result) for result in results)
    for user in list(call.users):
        if user.target is not operator.getitem:
            raise CompileError(f"{user.name} takes the result of a region whole")
        user.replace_all_uses_with(results[int(user.args[1])])  # type: ignore[arg-type]
        graph.erase_node(user)
    graph.erase_node(call)


def _detached(graph: fx.Graph, result: object) -> object:
    if not isinstance(result, fx.Node):
        return result
    node = graph.call_function(torch.ops.aten.detach.default, (result,))
    node.meta = dict(result.meta)
    return node
