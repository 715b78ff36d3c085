"""Weights of language-model heads in compiled programs: shapes, entries and gradients in the closed
form, their place in the cores' memory, and rows of tables."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import pytest
from sparse_steps import pruned_case
from tiny_models import language_model

from penstock.engine import MaskState, costs_at, plan_wafer, stage_cycles_of
from penstock.engine.wafer_heads import heads_of
from penstock.errors import BudgetError
from penstock.wafer import SIM, Mesh, WaferOptions
from penstock.wafer.closed_form import (
    HeadShape,
    StreamedProduct,
    data_gradient,
    forward,
    weight_gradient,
)

OPTIONS = WaferOptions(Mesh(4, 4), SIM)
HEAD = "lm_head.weight"


@functools.cache
def pruned(family, name):
    """Return a compiled language model with a mask on one weight, or on none."""
    return pruned_case(language_model(family), lambda found, _: found == name).program


@pytest.fixture
def sparse():
    return pruned("llama", HEAD)


@pytest.fixture
def dense():
    return pruned("llama", "none")


def head_cycles(program, executable="turn", masks=None, options=OPTIONS):
    """Return the parts of the head's cycles, by name."""
    kind = program.stages[-1].kind
    found = stage_cycles_of(kind, executable, plan_wafer(program, options), masks)
    [head] = [operator for operator in found.operators if operator.cost.work == "head"]
    return {part.name: part for part in head.parts}, round(head.cost.size)


@pytest.mark.parametrize("executable", ["forward", "infer", "backward", "recompute", "turn"])
def test_sparse_head_has_the_shape_of_its_weight_and_the_entries_of_the_step(sparse, executable):
    kind = sparse.stages[-1].kind
    shape, capacity = sparse.weights[HEAD].shape, sparse.weights[HEAD].capacity
    [position] = kind.sparse
    most = HeadShape(*shape, capacity, capacity, is_sparse=True)
    assert heads_of(kind, executable, {}) == (most,)
    fewer = {position: MaskState(capacity // 3)}
    assert heads_of(kind, executable, fewer) == (replace(most, kept=capacity // 3),)


@pytest.mark.parametrize("share", [1, 4])
def test_products_of_a_sparse_head_are_those_of_a_sparse_layer(sparse, share):
    kind = sparse.stages[-1].kind
    shape, capacity = sparse.weights[HEAD].shape, sparse.weights[HEAD].capacity
    [position] = kind.sparse
    kept = capacity // share
    found, tokens = head_cycles(sparse, masks={position: MaskState(kept)})
    layout = plan_wafer(sparse, OPTIONS).kinds[kind.digest].layout
    product = StreamedProduct(*shape, tokens, density=kept / (shape[0] * shape[1]), element_bytes=4)
    for form in (forward, data_gradient, weight_gradient):
        expected = form(product, layout, SIM)
        assert found[expected.name] == expected


def test_gradient_of_every_element_of_a_head_is_dense(sparse):
    kind = sparse.stages[-1].kind
    [position] = kind.sparse
    capacity = sparse.weights[HEAD].capacity
    usual, tokens = head_cycles(sparse, masks={position: MaskState(capacity)})
    changing = {position: MaskState(capacity, dense_gradient=True)}
    more, _ = head_cycles(sparse, masks=changing)
    layout = plan_wafer(sparse, OPTIONS).kinds[kind.digest].layout
    shape = sparse.weights[HEAD].shape
    whole = StreamedProduct(*shape, tokens, is_indexed=False, element_bytes=4)
    assert more["weight gradient"] == weight_gradient(whole, layout, SIM)
    assert more["forward"] == usual["forward"]
    assert heads_of(kind, "forward", changing)[0].gradient == "all"


@pytest.mark.parametrize(("family", "name"), [("llama", HEAD), ("gpt2", "transformer.wte.weight")])
@pytest.mark.parametrize("executable", ["forward", "backward", "turn"])
def test_shape_of_a_dense_head_is_that_of_its_weight(family, name, executable):
    program = pruned(family, "none")
    shape = program.weights[name].shape
    assert heads_of(program.stages[-1].kind, executable, {}) == (HeadShape.dense(*shape),)


def test_bias_of_a_head_does_not_change_its_shape():
    program = pruned("bert", "none")
    [name] = [n for n in program.weights if n.endswith("word_embeddings.weight")]
    shape = program.weights[name].shape
    assert heads_of(program.stages[-1].kind, "turn", {}) == (HeadShape.dense(*shape),)


def test_sparse_head_takes_fewer_cycles_than_a_dense_one(sparse, dense):
    few, _ = head_cycles(sparse, "infer")
    all_, _ = head_cycles(dense, "infer")
    share = sparse.weights[HEAD].capacity / sparse.weights[HEAD].elements
    assert few["forward"].arithmetic < 2 * share * all_["forward"].arithmetic
    assert few["softmax"] == all_["softmax"]


@pytest.mark.parametrize("cycles", ["closed_form", "simulated"])
def test_head_beyond_the_cores_memory_is_refused_by_name(dense, cycles):
    core = replace(SIM, sram_bytes=SIM.reserved_bytes + 7_000)
    with pytest.raises(BudgetError) as refused:
        plan_wafer(dense, WaferOptions(Mesh(1, 2), core, cycles))
    # 16 tokens: 2 x 32 features of hidden states, 96 logits in place of their gradients, 9 sums.
    assert str(refused.value).startswith("engine.mesh: stage ")
    assert "a core has 11,176" in str(refused.value)


def test_gradient_of_a_table_moves_its_rows(dense):
    kind, rows = dense.stages[0].kind, {}
    for executable in ("forward", "backward"):
        plan = plan_wafer(dense, OPTIONS)
        costs = costs_at(kind, executable, plan.kinds[kind.digest].tokens, {})
        rows[executable] = [cost.bytes for cost in costs if cost.work == "lookup"]
    assert rows["forward"] == rows["backward"]


@pytest.mark.parametrize(("family", "turned"), [("llama", False), ("gpt2", True)])
def test_products_of_a_layer_have_the_sides_of_its_weights(family, turned):
    kind = pruned(family, "none").stages[1].kind  # its linear layers have biases in GPT-2 alone
    shapes = [spec.shape for spec in kind.weights if len(spec.shape) == 2]
    sides = Counter(tuple(shape)[::-1] if turned else tuple(shape) for shape in shapes)
    assert len(sides) > 2
    for executable, forms in (
        ("forward", ["forward"]),
        ("infer", ["forward"]),
        ("backward", ["data gradient", "weight gradient"]),
        ("turn", ["forward", "data gradient", "weight gradient"]),
    ):
        found: dict[str, Counter] = {form: Counter() for form in forms}
        for cost in kind.costs[executable]:
            if cost.form:
                found[cost.form] = found[cost.form] + Counter(
                    {(cost.outputs, cost.inputs): cost.calls}
                )
        assert found == dict.fromkeys(forms, sides), executable
