"""The account of an engine against what is predicted and against what PyTorch really allocates."""

import itertools
import math
import re

import pytest
import torch
from grids import thinned
from real_allocations import peak_allocated_bytes
from sweeps import sweep, sweep_and_let_go, weights_of
from tiny_models import LENGTH, language_model

from penstock.config.size import ByteSize
from penstock.engine import (
    EnginePlan,
    NullEngine,
    Sharing,
    TorchEngine,
    plan_engine,
    predict_bytes,
    torch_engine,
)
from penstock.errors import BudgetError
from penstock.planning import builders


def setting(family="gpt2", precision="fp32", micro_batches=4, **changes):
    """Return a compiled model, its weights, and micro-batches of two rows with memory apart."""
    case = language_model(family, **changes)
    program = builders.compile_source(
        case.source(0), micro_batch=2, length=LENGTH, precision=precision
    )
    weights = weights_of(case.plain(0), program)
    rows = {name: torch.from_numpy(value) for name, value in case.arrays(0).items()}
    batches = [
        {name: value[2 * i : 2 * i + 2].clone() for name, value in rows.items()}
        for i in range(micro_batches)
    ]
    return program, weights, batches


def plans_of(program):
    everything = range(len(program.stages) - 1)
    return [EnginePlan(), EnginePlan(frozenset(everything)), EnginePlan(frozenset({1}))]


@pytest.mark.parametrize(
    ("kind", "micro_batches"),
    thinned([*itertools.product(["gpt2", "llama", "bert"], ["fp32", "bf16"])], [1, 3, 8]),
)
def test_predicted_accounted_and_allocated_bytes_agree(kind, micro_batches):
    family, precision = kind
    program, weights, batches = setting(family, precision, micro_batches)
    largest = max(program.stage_stream_bytes(stage) for stage in program.stages)
    for plan in plans_of(program):
        engine = TorchEngine(program, plan)
        sweep(engine, plan, weights, batches)  # also lets libraries make what they keep
        predicted = predict_bytes(program, micro_batches, plan).peak_bytes
        # A slot more than the account, which sees one stage's weights at a time.
        assert engine.memory.peak_bytes <= predicted
        assert predicted <= 1.03 * engine.memory.peak_bytes + largest
        allocated = peak_allocated_bytes(
            lambda plan=plan: sweep_and_let_go(TorchEngine(program, plan), plan, weights, batches)
        )
        assert allocated <= 1.01 * predicted  # a library's own buffers are not foreseen


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_null_engine_accounts_as_the_torch_engine(family):
    program, weights, batches = setting(family)
    for plan in plans_of(program):
        real, null = TorchEngine(program, plan), NullEngine(program, plan)
        meta = {name: tensor.to("meta") for name, tensor in weights.items()}
        empty = [{n: v.to("meta") for n, v in rows.items()} for rows in batches]
        first = sweep(real, plan, weights, batches)
        second = sweep(null, plan, meta, empty)
        assert null.memory.peak_bytes == pytest.approx(real.memory.peak_bytes, rel=0.03)
        assert second.losses == [0.0] * len(first.losses)
        for name, gradient in first.gradients.items():
            assert second.gradients[name].shape == gradient.shape


def test_an_engine_refuses_to_go_beyond_its_budget():
    program, weights, batches = setting()
    plan = EnginePlan()
    peak = predict_bytes(program, len(batches), plan).peak_bytes
    sweep(TorchEngine(program, plan, budget_bytes=peak), plan, weights, batches)
    with pytest.raises(BudgetError) as caught:
        sweep(TorchEngine(program, plan, budget_bytes=peak // 2), plan, weights, batches)
    assert re.fullmatch(
        r"stage \S+ needs [\d,]+ bytes on the engine, the budget is [\d,]+; "
        r"raise engine\.memory or lower batch\.micro",
        str(caught.value),
    )


@pytest.mark.parametrize("kind", ["always", "never", "auto"])
def test_budget_named_by_the_refusal_suffices_and_less_does_not(kind):
    program, weights, batches = setting("llama", num_hidden_layers=4)
    with pytest.raises(BudgetError) as caught:
        plan_engine(program, len(batches), 50_000, kind)
    named = re.fullmatch(
        r"the engine needs (?P<needs>\S+ [KM]iB) for a step of 4 micro-batches, the budget is "
        r"\S+ KiB; the peak is at stage \S+\. Raise engine\.memory to at least (?P=needs), or "
        r"lower batch\.micro, batch\.size or data\.sequence_length\.",
        str(caught.value),
    )
    enough = int(ByteSize.parse(named["needs"].replace(" ", "")))
    plan = plan_engine(program, len(batches), enough, kind)
    exact = predict_bytes(program, len(batches), plan).peak_bytes
    assert enough - exact < 0.011 * 2**20
    sweep(TorchEngine(program, plan, budget_bytes=exact), plan, weights, batches)
    if kind != "auto" or plan.recompute == plans_of(program)[1].recompute:
        with pytest.raises(BudgetError):
            plan_engine(program, len(batches), exact - 1, kind)


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize("fitting", [0, 1, 3])
def test_refusal_of_micro_batches_of_one_row_names_the_batch_that_fits(engines, fitting):
    case = language_model("gpt2")
    program = builders.compile_source(
        case.source(0), micro_batch=1, length=LENGTH, precision="fp32"
    )
    plan = plans_of(program)[1]
    budget = predict_bytes(program, fitting + 1, plan).peak_bytes - 1
    assert fitting == 0 or predict_bytes(program, fitting, plan).peak_bytes <= budget
    with pytest.raises(BudgetError) as caught:
        plan_engine(program, 8, budget, "always", engines=engines)
    batch = f"batch.size to {fitting * engines} or " if fitting else ""
    assert str(caught.value).endswith(f", or lower {batch}data.sequence_length.")
    assert "for a step of 8 micro-batches, " in str(caught.value)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_the_buffers_of_a_group_count_against_the_budget_of_each_device(devices):
    program, _, batches = setting("gpt2")
    share, sharing = -(-len(batches) // devices), Sharing(devices, len(batches))
    alone = predict_bytes(program, share, EnginePlan()).peak_bytes
    together = predict_bytes(program, share, EnginePlan(), sharing=sharing).peak_bytes
    # Two slots of the largest stage, and its gradients to go and to come: more than alone.
    largest = max(program.stage_stream_bytes(stage) for stage in program.stages)
    gradients = max(4 * sum(math.prod(w.shape) for w in s.kind.weights) for s in program.stages)
    assert together - alone >= largest + gradients
    plan_engine(program, share, together, "never", sharing=sharing)
    with pytest.raises(BudgetError, match=r"Raise engine\.memory to at least"):
        plan_engine(program, share, together - 1, "never", sharing=sharing)


@pytest.mark.long
def test_recomputation_is_minimal_for_the_budget():
    program, _, batches = setting("gpt2", n_layer=8)
    keep, make = plans_of(program)[:2]
    high = predict_bytes(program, len(batches), keep).peak_bytes
    low = predict_bytes(program, len(batches), make).peak_bytes
    counts = []
    for part in range(5):
        budget = low + (high - low) * part // 4
        plan = plan_engine(program, len(batches), budget)
        assert predict_bytes(program, len(batches), plan).peak_bytes <= budget
        counts.append(len(plan.recompute))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[4] == 0
    assert plan_engine(program, len(batches), None) == EnginePlan()


@pytest.mark.long
def test_depth_adds_only_boundary_activations():
    """With everything recomputed: weights, gradients and inner values of one stage, any depth."""
    boundary = 4 * 2 * LENGTH * 32 * 4  # micro-batches x [2, LENGTH, 32] in float32
    found = {}
    for layers in (3, 6, 12):
        program, weights, batches = setting(n_layer=layers)
        plan = plans_of(program)[1]
        engine = TorchEngine(program, plan)
        sweep(engine, plan, weights, batches)
        found[layers] = engine.memory.peak_bytes
    assert found[6] - found[3] == 3 * boundary
    assert found[12] - found[6] == 6 * boundary


def test_memory_is_prepared_for_whatever_a_step_allocates(monkeypatch):
    """Each executable's allocations are announced, and wider sums of several micro-batches."""
    program, weights, batches = setting("gpt2", "bf16", 2)
    announced = []
    monkeypatch.setattr(torch_engine, "begin_call", announced.append)
    engine = TorchEngine(program, EnginePlan())
    sweep(engine, EnginePlan(), weights, batches)
    kinds = [stage.kind for stage in program.stages]
    expected = [kind.forward_transient_bytes for kind in kinds[:-1]]
    expected += [kinds[-1].turn_transient_bytes]
    expected += [kind.backward_transient_bytes for kind in kinds[:-1] if any(kind.outputs_grad)]
    for size in set(expected):
        assert announced.count(size) >= 2 * expected.count(size)
    names = itertools.chain.from_iterable(stage.weights for stage in program.stages)
    elements = sum(program.weights[name].elements for name in names)
    assert sum(announced) - 2 * sum(expected) == 4 * elements  # float32 sums of bfloat16


def test_engine_on_another_device_does_not_prepare_the_memory_of_the_host(monkeypatch):
    program, _, _ = setting("gpt2", "fp32", 1)
    announced = []
    monkeypatch.setattr(torch_engine, "begin_call", announced.append)
    predict_bytes(program, 5, EnginePlan(frozenset({1})))  # a dry run on the meta device
    assert not announced
