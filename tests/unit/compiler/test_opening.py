"""Weights that stream as bfloat16 are widened where a float32 stage reads them, and no further."""

import pytest
import torch
from torch import fx

from penstock.compiler.weight_conversion import open_weight

aten = torch.ops.aten
F32, BF16 = torch.float32, torch.bfloat16


def graph_of(build):
    """Return a graph of `w`, `x` and the nodes that `build` makes of them."""
    graph = fx.Graph()
    weight, x = graph.placeholder("w"), graph.placeholder("x")
    graph.output(build(graph, weight, x))
    return graph, weight


def run(graph, *given):
    return fx.GraphModule(torch.nn.Module(), graph)(*given)


def widened_shapes(graph, *given):
    """Return the shapes of all that is converted to float32 when the graph runs."""
    found = []

    class Watching(fx.Interpreter):
        def call_function(self, target, args, kwargs):
            made = super().call_function(target, args, kwargs)
            if target is aten._to_copy.default:
                found.append(tuple(made.shape))
            return made

    Watching(fx.GraphModule(torch.nn.Module(), graph)).run(*given)
    return found


def product(graph, weight, x):
    first = graph.call_function(aten.mm.default, (x, weight))
    return (graph.call_function(aten.mm.default, (first, weight)),)


def lookup(graph, weight, x):
    rows = graph.call_function(aten.embedding.default, (weight, x))
    return (rows, graph.call_function(aten.neg.default, (rows,)))


def both(graph, weight, x):
    rows = graph.call_function(aten.embedding.default, (weight, x))
    return (
        graph.call_function(
            aten.mm.default, (rows, graph.call_function(aten.t.default, (weight,)))
        ),
    )


def passed_on(graph, weight, x):
    return (weight, x)


IDS = torch.tensor([3, 0, 3])
CASES = {
    "a product": (product, torch.randn(2, 8, generator=torch.Generator().manual_seed(1))),
    "a table": (lookup, IDS),
    "a table that is a head too": (both, IDS),
    "the weight itself": (passed_on, IDS),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_results_equal_those_of_the_widened_weight(case, seed):
    build, x = CASES[case]
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).to(BF16)
    expected = run(graph_of(build)[0], weight.float(), x)
    graph, node = graph_of(build)
    open_weight(graph, node, F32)
    graph.lint()
    for found, wanted in zip(run(graph, weight, x), expected, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted), seed


def test_only_read_rows_of_an_embedding_are_widened():
    weight = torch.zeros(1000, 8, dtype=BF16)
    graph, node = graph_of(lookup)
    open_weight(graph, node, F32)
    assert widened_shapes(graph, weight, IDS) == [(3, 8)]


def test_weight_read_twice_is_widened_once():
    graph, node = graph_of(product)
    open_weight(graph, node, F32)
    assert widened_shapes(graph, torch.zeros(8, 8, dtype=BF16), CASES["a product"][1]) == [(8, 8)]
