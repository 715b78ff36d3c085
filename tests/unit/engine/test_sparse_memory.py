"""The account of an engine with sparse weights against what is predicted and really allocated."""

from __future__ import annotations

import functools
import gc
import tracemalloc

import pytest
import torch
from grids import thinned
from real_allocations import peak_allocated_bytes
from sparse_steps import KERNELS, TILES, capacities, micro_batches_of, pruned_case
from sweeps import sweep, sweep_and_let_go
from tiny_models import language_model

from penstock.engine import (
    EnginePlan,
    NullEngine,
    TorchEngine,
    plan_engine,
    predict_bytes,
)
from penstock.engine.sparse_weights import EmptySparse, dense_gradient_bytes
from penstock.errors import BudgetError
from penstock.planning.step_flops import StepFlops
from penstock.sparsity import SparseWeight
from penstock.step_schedule import StepSchedule

CHOICES = {"kernels": KERNELS, "tiles": TILES}


def in_blocks(name, parameter):
    return parameter.dim() == 2 and any(part.isdigit() for part in name.split("."))


@functools.cache
def setting(family="gpt2", precision="fp32", **changes):
    case = language_model(family, **changes)
    return pruned_case(case, in_blocks, precision=precision), micro_batches_of(case)


def plans_of(model, **options):
    everything = frozenset(range(len(model.program.stages) - 1))
    return [EnginePlan(**options), EnginePlan(everything, **options)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("products", "kind"),
    thinned(
        [("kernels", False), ("kernels", True), ("tiles", True), ("tiles", False)],
        [("gpt2", "fp32"), ("llama", "bf16")],
        others=pytest.mark.long,
    ),
)
def test_account_and_allocations_stay_below_the_prediction(products, kind):
    choice, dense_gradient = products
    model, batches = setting(*kind)
    weights = model.weights(dense_gradient=dense_gradient)
    for plan in plans_of(model, dense_gradients=dense_gradient):
        predicted = predict_bytes(model.program, len(batches), plan).peak_bytes
        shared = model.products(CHOICES[choice])
        engine = TorchEngine(model.program, plan, sparse=shared)
        sweep(engine, plan, weights, batches)
        assert engine.memory.peak_bytes <= predicted
        sweep(engine, plan, weights, batches)
        assert engine.memory.peak_bytes <= predicted

        def step(plan=plan, shared=shared):
            engine = TorchEngine(model.program, plan, sparse=shared)
            sweep_and_let_go(engine, plan, weights, batches)

        layouts = sum(layout.nbytes for _, layout in shared._layouts.values())
        allocated = peak_allocated_bytes(step) + layouts
        assert allocated <= 1.01 * predicted


@pytest.mark.long
def test_kept_layouts_are_accounted_with_their_exact_size():
    model, batches = setting()
    plan = EnginePlan()
    shared = model.products()
    engine = TorchEngine(model.program, plan, sparse=shared)
    sweep(engine, plan, model.weights(), batches)
    layouts = {name: layout for name, (_, layout) in shared._layouts.items()}
    assert engine._layout_bytes == {name: layout.nbytes for name, layout in layouts.items()}
    assert set(layouts) == set(model.masks)

    def copy():
        for weight in model.weights().values():
            if isinstance(weight, SparseWeight):
                prepared = again.prepare(weight)
                x = torch.zeros(32, prepared.layout.shape[1])
                y = torch.zeros(32, prepared.layout.shape[0])
                prepared.multiply(x, None, False)
                prepared.multiply(y, None, True)
                prepared.gradient(x, y, False)

    again = model.products()
    copy()  # compiles, and fills what the libraries keep
    again = model.products()
    held = arrays_held(copy, lambda: again)
    exact = sum(layout.nbytes for layout in layouts.values())
    assert exact <= held <= 1.1 * exact + 4000 * len(layouts)


def arrays_held(body, keep) -> int:
    """Return the bytes that are still alive after `body`."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        body()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        keep()


@pytest.mark.parametrize("dense_gradient", [False, True])
def test_the_null_engine_takes_what_a_store_sends_and_returns_gradients_of_its_shape(
    dense_gradient,
):
    model, batches = setting()
    weights = model.weights(dense_gradient=dense_gradient)
    for plan in plans_of(model, dense_gradients=dense_gradient):
        real = TorchEngine(model.program, plan, sparse=model.products())
        null = NullEngine(model.program, plan)
        first = sweep(real, plan, weights, batches)
        second = sweep(null, plan, weights, batches)
        assert second.losses == [0.0] * len(first.losses)
        for name, gradient in first.gradients.items():
            assert second.gradients[name].shape == gradient.shape, name
        assert real.memory.peak_bytes <= null.memory.peak_bytes


@pytest.mark.long
def test_gradients_and_streams_shrink_with_the_capacity():
    """What a sparser model saves is in the prediction: a quarter of the entries."""
    case = language_model("gpt2", n_embd=128)
    shapes = {n: p for n, p in case.plain(0).named_parameters() if in_blocks(n, p)}
    model = pruned_case(case, in_blocks)
    dense = pruned_case(case, lambda *_: False)
    saved = sum(4 * p.numel() for p in shapes.values()) - 4 * sum(capacities(model.masks).values())
    stages = [s for s in dense.program.stages if s.kind.name == "h"]
    before = sum(s.kind.backward_transient_bytes for s in stages)
    after = sum(s.kind.backward_transient_bytes for s in model.program.stages if s.kind.name == "h")
    assert saved > 0
    assert after < before


@pytest.mark.long
def test_steps_with_dense_gradients_need_more_and_the_plan_says_so():
    model, batches = setting("gpt2", n_embd=64)
    usual = predict_bytes(model.program, len(batches), EnginePlan()).peak_bytes
    dense = predict_bytes(model.program, len(batches), EnginePlan(dense_gradients=True)).peak_bytes
    assert dense > usual
    plan = plan_engine(model.program, len(batches), dense, "never", dense_gradients=True)
    assert plan.dense_gradients
    with pytest.raises(BudgetError, match=r"Raise engine\.memory to at least"):
        plan_engine(model.program, len(batches), dense - 1, "never", dense_gradients=True)
    plan_engine(model.program, len(batches), dense - 1, "never")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_schedule_with_dense_gradients_has_the_bytes_of_the_engine_and_the_operations_of_a_step(
    precision,
):
    model, batches = setting("gpt2", precision, n_embd=64)
    program, kept = model.program, model.program.capacities
    for is_dense in (False, True):
        schedule = StepSchedule.of(program, dense_gradients=is_dense)
        flops = len(batches) * sum(each.flops for each in schedule.operations)
        assert flops == StepFlops(program, len(batches)).of(kept, is_dense)
    usual = StepSchedule.of(program).operations
    for before, after in zip(usual, schedule.operations, strict=True):
        streamed = [
            EmptySparse.of(program.weights[name], True) for name in before.gradients if name in kept
        ]
        more = sum(map(dense_gradient_bytes, streamed))
        assert after.transient_bytes - before.transient_bytes == more
    assert any(each.dense_gradients for each in schedule.operations)
