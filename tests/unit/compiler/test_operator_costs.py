"""The costs of operators, against sizes that can be counted by hand."""

from typing import get_args

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.compiler.counted_costs import _WORK_OF_OPERATORS, operator_costs, total_flops
from penstock.machines import Work

aten = torch.ops.aten


def costs_of(function, *shapes, dtype=torch.float32):
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
        return operator_costs(make_fx(function)(*inputs).graph)


def test_product_has_its_operations_bytes_and_smallest_dimension():
    [cost] = costs_of(torch.mm, (64, 256), (256, 1024))
    assert (cost.work, cost.layout, cost.size) == ("product", "features", 64)
    assert cost.flops == 2 * 64 * 256 * 1024
    assert cost.bytes == 4 * (64 * 256 + 256 * 1024 + 64 * 1024)


def test_gradient_of_a_weight_sums_over_tokens():
    [cost] = costs_of(lambda dy, x: dy.t() @ x, (512, 96), (512, 48))
    assert (cost.layout, cost.size, cost.flops) == ("tokens", 48, 2 * 512 * 96 * 48)


def test_view_costs_nothing():
    assert costs_of(lambda x: x.view(4, 8).t().unsqueeze(0), (32,)) == ()


def test_equal_calls_are_counted_together():
    [cost] = costs_of(lambda x: torch.tanh(torch.tanh(torch.tanh(x))), (16, 16))
    assert (cost.work, cost.calls, cost.flops, cost.bytes) == ("activation", 3, 0, 2 * 4 * 256)


def test_lookup_reads_its_rows_and_not_the_table():
    def look_up(table):
        return aten.embedding(table, torch.zeros(10, dtype=torch.int64))

    lookups = [cost for cost in costs_of(look_up, (50_000, 64)) if cost.name == "embedding"]
    assert [cost.bytes for cost in lookups] == [2 * 4 * 10 * 64]


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float16, "bfloat16")]
)
def test_types_of_two_bytes_are_one_type(dtype, name):
    [cost] = costs_of(torch.mm, (8, 8), (8, 8), dtype=dtype)
    assert cost.dtype == name
    assert cost.bytes == 3 * 2 * 64


def test_attention_counts_both_products_and_has_the_length_as_its_size():
    def attend(q, k, v):
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

    costs = costs_of(attend, *3 * [(2, 4, 128, 64)])
    [cost] = [each for each in costs if each.work == "attention"]
    assert cost.size == 128
    assert cost.flops == 2 * 4 * (2 * 128 * 128 * 64) * 2


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_attention_of_a_gpu_counts_the_products_of_all_query_heads(kernel, key_heads):
    """Traced on the meta device: the shapes are those of a GPU."""
    operator = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
    more = {"flash": (), "efficient": (None, True)}[kernel]
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("q", "k", "v")]
    for node, heads in zip(nodes, (4, key_heads, key_heads), strict=True):
        node.meta["val"] = torch.empty(2, heads, 128, 64, dtype=torch.bfloat16, device="meta")
    out = graph.call_function(operator.default, (*nodes, *more))
    out.meta["val"] = (torch.empty_like(nodes[0].meta["val"]),)
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    again = graph.call_function(backward, (nodes[0], *nodes))
    again.meta["val"] = tuple(node.meta["val"] for node in nodes)
    forward, gradients = operator_costs(graph)
    assert (forward.work, forward.size, gradients.work, gradients.size) == 2 * ("attention", 128)
    assert forward.flops == 2 * 4 * (2 * 128 * 128 * 64) * 2
    assert gradients.flops == 2.5 * forward.flops


def test_operations_of_all_calls_are_added():
    costs = costs_of(lambda x, w: x @ w @ w, (8, 16), (16, 16))
    assert total_flops(costs) == 2 * (2 * 8 * 16 * 16)


def test_every_kind_of_work_is_one_that_machines_know():
    assert set(_WORK_OF_OPERATORS) <= set(get_args(Work))


@pytest.mark.parametrize(("with_weight", "products"), [(True, 3), (False, 2)])
@pytest.mark.parametrize("name", ["linear_cross_entropy_backward", "linear_cross_entropy_turn"])
def test_gradients_of_a_frozen_head_have_one_product_less(name, with_weight, products):
    operator = getattr(torch.ops.penstock, name).default

    def gradients(scale, hidden, weight):
        labels = torch.zeros(64, dtype=torch.int64)
        return operator(scale, hidden, weight, None, labels, -100, with_weight)

    costs = costs_of(gradients, (), (64, 32), (500, 32))
    assert total_flops(costs) == products * 2 * 64 * 32 * 500
