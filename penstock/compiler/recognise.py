"""Recognise composed activation functions and replace them by the fused operator.

Models write GELU in many ways (`0.5 x (1 + tanh(...))` with the terms in any order). Instead of
matching spellings, a small subgraph of elementwise operators over one tensor is *evaluated* in
float64 on a dense grid and compared with the functions that PyTorch has fused. If they are equal to
1e-7 everywhere on the grid (models round the constants), the subgraph is that function. The
composed operator saves four tensors for backward; the fused operator saves one and reads memory
once.
"""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import fx

from penstock.compiler.nodes import erase_unused

aten = torch.ops.aten

_ELEMENTWISE = {
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.div.Tensor,
    aten.pow.Tensor_Scalar,
    aten.tanh.default,
    aten.erf.default,
    aten.sigmoid.default,
    aten.exp.default,
    aten.neg.default,
    aten.square.default,
    aten.reciprocal.default,
}
_TRANSCENDENTAL = {
    aten.tanh.default,
    aten.erf.default,
    aten.sigmoid.default,
    aten.exp.default,
}
_FUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[..., fx.Node]]] = {
    "gelu_tanh": (
        functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        lambda g, x: g.call_function(aten.gelu.default, (x,), {"approximate": "tanh"}),
    ),
    "gelu": (
        torch.nn.functional.gelu,
        lambda g, x: g.call_function(aten.gelu.default, (x,)),
    ),
    "silu": (
        torch.nn.functional.silu,
        lambda g, x: g.call_function(aten.silu.default, (x,)),
    ),
}
_MOST_NODES = 16


def fuse_activations(graph: fx.Graph) -> int:
    """Replace composed GELU and SiLU in `graph`; return how many were replaced."""
    grid = torch.cat(
        [torch.linspace(-12, 12, 4801, dtype=torch.float64), torch.tensor([-1e4, -50.0, 50.0, 1e4])]
    )
    references = {name: reference(grid) for name, (reference, _) in _FUSED.items()}
    # New nodes are inserted after all nodes that remain to be visited.
    order = {node: place for place, node in enumerate(graph.nodes)}
    replaced = 0
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.target not in _ELEMENTWISE or not node.users:
            continue
        found = _region(node, order)
        if found is None:
            continue
        source, members = found
        name = _match(node, source, members, grid, references)
        if name is None:
            continue
        with graph.inserting_before(node):
            fused = _FUSED[name][1](graph, source)
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        replaced += 1
    erase_unused(graph)
    return replaced


def _region(end: fx.Node, order: Mapping[fx.Node, int]) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return the one tensor that `end` is an elementwise function of, and the nodes between.

    The source is the nearest node on every path from `end` upward; None if the paths do not meet
    within a few nodes or contain no transcendental function.
    """
    members: set[fx.Node] = set()
    frontier: set[fx.Node] = {end}
    while len(members) <= _MOST_NODES:
        latest = max(frontier, key=order.__getitem__)
        if len(frontier) == 1 and members & {latest} == set() and latest is not end:
            inner = any(m.target in _TRANSCENDENTAL for m in members)
            if inner:
                return latest, sorted(members, key=order.__getitem__)
        if latest.op != "call_function" or latest.target not in _ELEMENTWISE:
            return None
        frontier.remove(latest)
        members.add(latest)
        frontier.update(latest.all_input_nodes)
        if not frontier:
            return None
    return None


def _match(
    end: fx.Node,
    source: fx.Node,
    members: list[fx.Node],
    grid: torch.Tensor,
    references: Mapping[str, torch.Tensor],
) -> str | None:
    """Evaluate the region on the grid and return the equal fused function, if there is one."""
    outside = [u for m in members if m is not end for u in m.users if u not in members]
    if outside or not source.meta["val"].is_floating_point():
        return None
    values: dict[fx.Node, torch.Tensor] = {source: grid}
    for member in members:
        args = fx.node.map_arg(member.args, lambda n: values[n])
        kwargs = fx.node.map_arg(member.kwargs, lambda n: values[n])
        assert isinstance(member.target, torch._ops.OpOverload)
        values[member] = member.target(*args, **kwargs)
    for name, reference in references.items():
        if torch.allclose(values[end], reference, rtol=1e-7, atol=1e-7):
            return name
    return None
