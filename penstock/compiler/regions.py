"""Inline the regions that export creates for `torch.no_grad()` and `torch.autocast(...)`.

Export represents such a region as a call of a submodule. A program does not need regions: a
region's operators are moved into the caller's graph, and values read by a region without gradients
are detached.
"""

import operator
from collections.abc import Container

import torch
from torch import fx

from penstock.compiler.tensors import may_need_gradient
from penstock.errors import CompileError

_RECORDS = "records_gradients"  # meta key: does its innermost region record?


def records_gradients(node: fx.Node) -> bool:
    """Return whether autograd is on where the user's forward runs this operator."""
    return bool(node.meta.get(_RECORDS, True))


def inline_regions(module: fx.GraphModule) -> fx.Graph:
    """Return the module's graph with every region inlined, in place.

    `detach_reads` applies the effect of `torch.no_grad()` to the operators.
    """
    graph = module.graph
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)  # an export with regions may miss a reader
    again = True
    while again:
        again = False
        for node in list(graph.nodes):
            name = getattr(node.target, "__name__", "")
            if node.op != "call_function" or not name.startswith("wrap_with_"):
                continue
            if name == "wrap_with_set_grad_enabled":
                enabled, body, *args = node.args
                records = bool(enabled)
            elif name == "wrap_with_autocast":
                _, _, enabled, _, body, *args = node.args
                if enabled:
                    raise CompileError(
                        "the forward enters torch.autocast itself: remove it and set "
                        "precision: bf16 in the configuration instead"
                    )
                records = records_gradients(node)
            else:
                raise CompileError(f"the forward uses {name}, which Penstock does not compile")
            assert isinstance(body, fx.Node)
            _inline(graph, node, _graph_of(module, body), args, records)
            again = True
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return graph


def detach_reads(graph: fx.Graph, weights: Container[str]) -> None:
    """Detach values that depend on a weight if an operator without gradients reads them.

    **Arguments:** `graph`, which writes no tensor in place; `weights`, the names of placeholders.
    """
    differentiable: set[fx.Node] = set()
    for node in list(graph.nodes):
        sources = [n for n in node.all_input_nodes if n in differentiable]
        is_weight = node.op == "placeholder" and node.name in weights
        hands_on = records_gradients(node) or node.target is operator.getitem
        if is_weight or (sources and hands_on):
            differentiable.add(node)
        elif node.op == "call_function":
            for source in sources:
                detach_read(graph, node, source)


def detach_read(graph: fx.Graph, reader: fx.Node, source: fx.Node) -> None:
    """Make one reader of a value read it detached."""
    if may_need_gradient(source.meta.get("val")):
        with graph.inserting_before(reader):
            node = graph.call_function(torch.ops.aten.detach.default, (source,))
        node.meta = dict(source.meta)
        reader.replace_input_with(source, node)


def _graph_of(module: fx.GraphModule, body: fx.Node) -> fx.Graph:
    region = module.get_submodule(str(body.target))
    assert isinstance(region, fx.GraphModule)
    return region.graph


def _inline(
    graph: fx.Graph, call: fx.Node, body: fx.Graph, args: list[object], records: bool
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
                made[node].meta[_RECORDS] = records  # type: ignore[attr-defined]
    for user in list(call.users):
        if user.target is not operator.getitem:
            raise CompileError(f"{user.name} takes the result of a region whole")
        user.replace_all_uses_with(results[int(user.args[1])])  # type: ignore[arg-type]
        graph.erase_node(user)
    graph.erase_node(call)
