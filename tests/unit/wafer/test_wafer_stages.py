"""Cycles of stages: shapes from the compiler's own counts, and operators by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.compiler.counted_costs import operator_costs
from penstock.compiler.weight_products import mark_weight_products
from penstock.errors import BudgetError, ConfigError
from penstock.operator_cost import OperatorCost
from penstock.wafer import SILICON, SIM, CoreParameters, Mesh
from penstock.wafer.closed_form import (
    ActivationLayout,
    HeadShape,
    StreamedProduct,
    attention,
    candidate_layouts,
    choose_stage_layout,
    data_gradient,
    forward,
    lookup,
    memory_pass,
    norm,
    sram_use,
    stage_cycles,
    streams_weight,
    token_sum,
    weight_gradient,
)
from penstock.wafer.language import MeshProgram

TOKENS = 96
LAYOUT = ActivationLayout(Mesh(8, 8))


def costs_of(function, *shapes, dtype=torch.float32, weights=(), tangents=()):
    """Return the costs of a function; its other arguments are inputs of a stage."""
    with torch._subclasses.FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
        graph = make_fx(function)(*inputs).graph
    places = graph.find_nodes(op="placeholder")
    of_weights, later = ([places[number] for number in chosen] for chosen in (weights, tangents))
    data = [place for place in places if place not in (*of_weights, *later)]
    mark_weight_products(graph, of_weights, data, later)
    return operator_costs(graph)


def linear_costs(outputs, inputs, dtype, turned=False):
    """Return the costs of the three products of a linear layer; its weight is [outputs, inputs], or
    `turned`."""
    weight = (inputs, outputs) if turned else (outputs, inputs)

    def backward(x, dy, w):
        return dy @ (w.t() if turned else w), x.t() @ dy if turned else dy.t() @ x

    ahead = costs_of(
        lambda x, w: x @ (w if turned else w.t()),
        *((TOKENS, inputs), weight),
        dtype=dtype,
        weights=[1],
    )
    shapes = ((TOKENS, inputs), (TOKENS, outputs), weight)
    back = costs_of(backward, *shapes, dtype=dtype, weights=[2], tangents=[1])
    return ahead, back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(48, 144), (64, 64), (192, 48)])
def test_products_of_a_weight_have_its_sides_whatever_its_orientation(
    inputs, outputs, turned, dtype
):
    ahead, back = linear_costs(outputs, inputs, dtype, turned)
    found = [(cost.form, cost.outputs, cost.inputs) for cost in (*ahead, *back)]
    forms = ("forward", "data gradient", "weight gradient")
    assert found == [(form, outputs, inputs) for form in forms]
    assert all(streams_weight(cost, TOKENS) for cost in (*ahead, *back))
    assert not any(streams_weight(cost, TOKENS - 1) for cost in (*ahead, *back))


def test_product_with_a_bias_has_the_sides_of_its_weight():
    shapes = ((144,), (TOKENS, 48), (48, 144))
    [cost] = costs_of(torch.addmm, *shapes, weights=[0, 2])
    assert (cost.form, cost.outputs, cost.inputs) == ("forward", 144, 48)


def test_products_of_activations_have_no_weight():
    [cost] = costs_of(torch.bmm, (6, 32, 40), (6, 40, 32))
    assert (cost.form, cost.outputs, cost.inputs) == ("", 0, 0)
    [cost] = costs_of(torch.mm, (TOKENS, 48), (48, 48))
    assert (cost.form, cost.outputs, cost.inputs) == ("", 0, 0)


def test_batched_product_is_never_faster_than_its_arithmetic():
    [cost] = costs_of(torch.bmm, (6, 32, 40), (6, 40, 32))
    [operator] = stage_cycles([cost], 64, LAYOUT, SIM).operators
    assert operator.cycles >= cost.flops / 2 / LAYOUT.mesh.cores / SIM.simd_float


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 144), (144, 48)])
def test_stage_is_the_sum_of_its_products(inputs, outputs):
    ahead, back = linear_costs(outputs, inputs, torch.bfloat16)
    product = StreamedProduct(outputs, inputs, TOKENS, is_indexed=False)
    forms = [form(product, LAYOUT, SIM).total for form in (forward, data_gradient, weight_gradient)]
    assert stage_cycles(ahead, TOKENS, LAYOUT, SIM).cycles == forms[0]
    assert stage_cycles(back, TOKENS, LAYOUT, SIM).cycles == forms[1] + forms[2]
    assert stage_cycles([*ahead, *back], TOKENS, LAYOUT, SIM).cycles == sum(forms)


def test_calls_count_as_often_as_they_are_made():
    [cost] = costs_of(torch.mm, (TOKENS, 48), (48, 48), weights=[1])
    twice = OperatorCost(**{**vars(cost), "calls": 2})
    one, two = (stage_cycles([item], TOKENS, LAYOUT, SIM) for item in (cost, twice))
    assert two.cycles == 2 * one.cycles
    assert two.by_work == {"product": two.cycles}


def test_sparse_product_streams_its_density_with_indices():
    cost = OperatorCost(
        "sparse_linear",
        "sparse product",
        "bfloat16",
        "any",
        0.125,
        2 * TOKENS * 48 * 96 // 8,
        2 * (TOKENS * 144 + 48 * 96),
        outputs=48,
        inputs=96,
    )
    product = StreamedProduct(48, 96, TOKENS, density=0.125)
    for form in (forward, data_gradient, weight_gradient):
        expected = form(product, LAYOUT, SIM)
        found = stage_cycles([replace(cost, form=expected.name)], TOKENS, LAYOUT, SIM)
        assert found.cycles == expected.total


def test_head_is_its_product_and_a_softmax_over_the_vocabulary():
    tokens, hidden, words = 64, 32, 500
    moved = 2 * (tokens * hidden + hidden * words) + 8 * tokens + 4
    flops = 2 * tokens * hidden * words
    cost = OperatorCost("linear_cross_entropy", "head", "bfloat16", "any", tokens, flops, moved)
    [operator] = stage_cycles([cost], tokens, LAYOUT, SIM).operators
    product, softmax = operator.parts
    whole = StreamedProduct(words, hidden, tokens, is_indexed=False)
    assert product.total == forward(whole, LAYOUT, SIM).total
    assert softmax.name == "softmax"
    turned = OperatorCost(
        "linear_cross_entropy_turn",
        "head",
        "bfloat16",
        "any",
        tokens,
        3 * flops,
        2 * (moved - 8 * tokens - 4) + 8 * tokens + 4,
    )
    [operator] = stage_cycles([turned], tokens, LAYOUT, SIM).operators
    assert [part.name for part in operator.parts] == [
        "forward",
        "data gradient",
        "weight gradient",
        "softmax",
    ]


def test_operation_of_two_operands_reads_two_and_writes_one_per_cycle():
    core = CoreParameters("x")
    # 24 bytes per core and cycle: 4 elements of 2 bytes, three times.
    assert memory_pass(64 * 2400, LAYOUT, core, streams=3).total == 100
    assert memory_pass(64 * 2400, LAYOUT, core, 4, streams=3).total == 200
    assert memory_pass(64 * 2400, LAYOUT, core, streams=3, operations=8).total == 800


@pytest.mark.parametrize(("core", "element_bytes"), [(SIM, 2), (SIM, 4), (SILICON, 2)])
def test_operation_of_one_operand_takes_the_cycles_that_the_simulated_core_takes(
    core, element_bytes
):
    elements = 2048
    program = MeshProgram(Mesh(1, 1), core, element_bytes=element_bytes)
    x, y = (program.array(name, elements) for name in "xy")
    program.main().scale(y.all, x.all, 0.5, after=core.drain_cycles)
    one = ActivationLayout(Mesh(1, 1))
    found = memory_pass(2 * element_bytes * elements, one, core, element_bytes)
    assert found.arithmetic == core.elements_cycles(elements, element_bytes)
    assert found.total == pytest.approx(program.run().report.cycles, rel=0.01)


@pytest.mark.parametrize(
    ("function", "tensors", "operations"),
    [
        (lambda x: -x, 2, 1),
        (lambda x, y: x + y, 3, 1),
        (lambda x: x.to(torch.bfloat16, copy=True), 2, 1),
        (lambda x: torch.full_like(x, 2.0), 2, 1),
        (lambda x: torch.zeros(x.shape, dtype=x.dtype), 1, 1),
        (torch.tanh, 2, 8),
        (torch.ops.aten.tanh_backward.default, 3, 8),
        (lambda x: torch.softmax(x, 1), 2, 2),
        (lambda x, y: torch.ops.aten._softmax_backward_data(x, y, 1, x.dtype), 3, 2),
        (lambda x: x.sum(0), 1, 1),
    ],
)
def test_element_wise_operator_takes_the_cycles_of_the_elements_that_it_computes(
    function, tensors, operations
):
    shape, core = (64, 512), CoreParameters("x")  # 512 elements in each of 8x8 cores
    shapes = [shape] * max(1, tensors - 1)
    [cost] = costs_of(function, *shapes, dtype=torch.bfloat16)
    [operator] = stage_cycles([cost], 64, LAYOUT, core).operators
    # The sum also writes a result of 512 elements, which counts as read.
    beside = 2 if cost.work == "reduction" else 0
    assert operator.parts[0].arithmetic == operations * 512 / 4 + beside


def test_norm_sums_twice_over_its_column_of_cores():
    core = CoreParameters("x")
    found = norm(64 * 2400, 64, LAYOUT, core)
    # 8 tokens are 4 words: a chain of 8 cores, each of which takes a hop and 5 cycles; and back.
    assert found.fill == 2 * ((4 + 7 * 6) + (4 + 7 + 5))
    # 600 elements in a core, 4 per cycle, in two passes.
    assert found.arithmetic == 2 * 150


def test_norm_sums_over_column_groups_too():
    core = CoreParameters("x")
    layout = ActivationLayout(Mesh(8, 8), column_groups=2)
    found = norm(64 * 2400, 64, layout, core)
    # 16 tokens are 8 words: a chain down 8 cores and back; then 4 columns of 8 words, divided over
    # 8 rows, go 4 hops to the other group and back.
    column = (8 + 7 + 7 * 5) + (8 + 7 + 5)
    between = 4 + 4 + 5
    assert found.fill == 2 * (column + 2 * between)


def test_sum_over_tokens_has_a_word_for_each_feature_of_a_core():
    core = CoreParameters("x")
    # 64 tokens of 32 features in 2 bytes: 4 features in each of 8 rows, summed over 8 columns.
    found = token_sum(2 * 64 * 32, 64, LAYOUT, core)
    assert found.fill == 4 + 7 + 7 * 5
    assert found.arithmetic == 64 * 32 / 64 / 4


def head_cost(tokens, flops, times=1):
    name = "linear_cross_entropy" if times == 1 else "linear_cross_entropy_turn"
    return OperatorCost(name, "head", "bfloat16", "any", tokens, times * flops, 10**6)


@pytest.mark.parametrize("gradient", ["kept", "all", "none"])
def test_head_that_is_given_has_its_shape_entries_and_gradient(gradient):
    tokens, shape, capacity, kept = 64, (500, 32), 1600, 1000
    head = HeadShape(*shape, capacity, kept, is_sparse=True, gradient=gradient)
    cost = head_cost(tokens, 2 * tokens * capacity, 2 if gradient == "none" else 3)
    other = HeadShape.dense(100, 8)
    stage = stage_cycles([cost], tokens, LAYOUT, SIM, heads=(other, head))
    sparse = StreamedProduct(*shape, tokens, density=kept / (500 * 32))
    whole = StreamedProduct(*shape, tokens, is_indexed=False)
    expected = [forward(sparse, LAYOUT, SIM), data_gradient(sparse, LAYOUT, SIM)]
    expected += {
        "kept": [weight_gradient(sparse, LAYOUT, SIM)],
        "all": [weight_gradient(whole, LAYOUT, SIM)],
        "none": [],
    }[gradient]
    *found, softmax = stage.operators[0].parts
    assert found == expected
    # 11 operations on every logit, of 64 tokens over 500 labels, 4 per core and cycle.
    assert softmax.arithmetic == 11 * 64 * 500 / 64 / 4


def test_logits_of_a_head_are_once_in_the_memory_and_decide_the_refusal():
    tokens, mesh = 512, Mesh(2, 2)
    cost = head_cost(tokens, 2 * tokens * 500 * 8)
    heads = (HeadShape.dense(500, 8),)
    product = StreamedProduct(500, 8, tokens, is_indexed=False)
    use = sram_use(product, ActivationLayout(mesh), SIM, in_place=True)
    assert use.outputs == 256 * 2 * 250
    assert sram_use(product, ActivationLayout(mesh), SIM).outputs == 2 * use.outputs
    with pytest.raises(BudgetError) as refused:
        choose_stage_layout({"forward": [cost]}, tokens, mesh, SIM, heads=heads)
    # 256 tokens in a core, of 2 bytes: 2 x 4 features, 250 logits, and 9 sums.
    assert str(refused.value) == (
        "stage: 500 x 8 with 512 tokens on 2x2 cores needs 140,880 bytes per core (activations "
        "132,096, sums 4,608, program 4,176), a core has 49,152; at most 168 tokens fit; give "
        "fewer tokens (a smaller batch.micro) or take a larger mesh"
    )


def test_product_without_a_whole_weight_does_not_count_in_the_memory():
    [cost] = costs_of(torch.bmm, (6, 512, 640), (6, 640, 512))
    assert choose_stage_layout({"forward": [cost]}, 64, Mesh(2, 2), SIM).considered > 0


def test_lookup_crosses_the_host_link_once():
    found = lookup(8000, LAYOUT, SIM)
    assert found.total == pytest.approx(1000 / SIM.host_words_per_cycle + 14)


def test_attention_on_one_core_by_hand():
    core = CoreParameters("x")
    one = ActivationLayout(Mesh(1, 1))
    found = attention(16, 8, 16, one, core, head_size=8)
    # 16 keys x 8 features, scores and values, each 2 + 4 cycles; 11 operations on 16 x 16 scores.
    assert found.set_up == 2 * 16 * 8 * 2
    assert found.arithmetic == 2 * 16 * 8 * 4 + 16 * 4 * 11
    assert found.partial_sums == 0


@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(8, 8), Mesh(16, 4)], ids=str)
@pytest.mark.parametrize(("sequence", "tokens"), [(64, 64), (64, 512), (512, 512)])
def test_attention_is_never_faster_than_its_arithmetic(mesh, sequence, tokens):
    layout = ActivationLayout(mesh)
    found = attention(sequence, 64, tokens, layout, SIM)
    assert found.total >= 2 * sequence * 64 * tokens / mesh.cores / SIM.simd_half
    assert attention(sequence, 64, tokens, layout, SIM, is_backward=True).total > 2 * found.total


def test_attention_is_read_from_the_compilers_counts():
    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    shape = (3, 4, 32, 16)  # sequences, heads, length, features of a head
    costs = [c for c in costs_of(attend, shape, shape, shape) if c.work == "attention"]
    [operator] = stage_cycles(costs, 96, LAYOUT, SIM, head_size=16).operators
    expected = attention(32, 64, 96, LAYOUT, SIM, head_size=16, element_bytes=4)
    assert operator.parts == (expected,)


def test_layout_of_a_stage_is_the_fastest():
    ahead, back = linear_costs(144, 48, torch.bfloat16)
    costs = {"forward": ahead, "backward": back}
    choice = choose_stage_layout(costs, TOKENS, Mesh(8, 4), SIM)

    def cycles(layout):
        return sum(stage_cycles(parts, TOKENS, layout, SIM).cycles for parts in costs.values())

    assert choice.cycles == cycles(choice.layout)
    assert choice.cycles == min(cycles(layout) for layout in candidate_layouts(Mesh(8, 4)))


def test_stage_that_does_not_fit_is_refused():
    costs = {"forward": costs_of(torch.mm, (8192, 4096), (4096, 4096), weights=[1])}
    with pytest.raises(BudgetError) as error:
        choose_stage_layout(costs, 8192, Mesh(4, 4), SIM)
    assert str(error.value).startswith("stage: 4096 x 4096 with 8192 tokens on 4x4 cores needs ")


def test_stage_without_tokens_is_refused():
    with pytest.raises(ConfigError) as error:
        stage_cycles([], 0, LAYOUT, SIM)
    assert str(error.value) == "tokens: expected a number from 1 up, got 0"
