"""Sparse weights on a device that expands them: slots, masks, steps and the memory account.

The device is simulated on the CPU. There, the reference to the bit is an engine of the CPU that
expands every weight in one tile.
"""

from __future__ import annotations

import copy
import functools
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from random_lanes import RandomLanes
from real_allocations import peak_allocated_bytes
from simulated_device import simulate
from sparse_steps import (
    ONE_TILE,
    assert_close,
    assert_is_reference,
    masks_of,
    micro_batches_of,
    prune,
    pruned_case,
)
from sweeps import gradients_by_weight, sweep, sweep_and_let_go
from tiny_models import language_model

from penstock.engine import Batch, EnginePlan, NullEngine, mask_staging_bytes, predict_bytes
from penstock.engine.expanded_weights import DeviceMasks, ExpandedWeight, most_bitmap_bytes
from penstock.engine.lanes import HostLanes
from penstock.engine.slots import Arrived, DeviceSlots
from penstock.program import WeightSpec
from penstock.sparsity import SparseWeight, expand, expanded_products, index_of_mask
from penstock.weight_formats import PACKED


@pytest.fixture(scope="module", autouse=True)
def device():
    """Bands of some rows, so that the weights of these models have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expanded_products, "BAND_ELEMENTS", 2048)
        patch.setattr(expanded_products, "BAND_ROWS", 8)
        yield simulate(patch)


@functools.cache
def compiled(family, precision="fp32", **options):
    """Return a model and its micro-batches; compiled once."""
    case = language_model(family)
    return pruned_case(case, all_matrices, precision=precision, **options), micro_batches_of(case)


def all_matrices(name, parameter):
    return parameter.dim() == 2


def same_bits(first, second):
    assert first.losses == second.losses
    assert first.gradients.keys() == second.gradients.keys()
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name]), name


def plans_of(model, **options):
    everything = frozenset(range(len(model.program.stages) - 1))
    return [EnginePlan(**options), EnginePlan(everything, **options)]


def engine_of(device, model, plan):
    """Return an engine whose gradients stay valid when those of later stages arrive."""
    engine = device.make_engine(model.program, plan)

    def keep(compute, stage):
        nodes = compute(stage).wait()
        copies = [tuple(None if t is None else t.clone() for t in node.tensors) for node in nodes]
        return Arrived([replace(n, tensors=t) for n, t in zip(nodes, copies, strict=True)])

    engine.turn = functools.partial(keep, engine.turn)
    engine.backward = functools.partial(keep, engine.backward)
    return engine


def step(device, model, batches, plan=None, **options):
    plan = plan or EnginePlan()
    return sweep(engine_of(device, model, plan), plan, model.weights(**options), batches)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_has_the_bits_of_a_processor_that_expands_weights_in_one_tile(
    precision, device, monkeypatch
):
    monkeypatch.setattr(expanded_products, "BAND_ELEMENTS", 1 << 20)
    model, batches = compiled("gpt2", precision)
    expected = model.step(batches, choice=ONE_TILE)
    for plan in plans_of(model):
        same_bits(expected, step(device, model, batches, plan))
    if precision == "fp32":
        assert_is_reference(model, expected, batches)


@pytest.mark.parametrize("dense_gradient", [False, True])
def test_a_step_in_bands_is_that_of_the_masked_dense_model(dense_gradient, device):
    """The tied weight is an embedding, which is read expanded, and a head in chunks."""
    model, batches = compiled("gpt2")
    found = step(device, model, batches, dense_gradient=dense_gradient)
    assert_is_reference(model, found, batches)
    for name, mask in model.masks.items():
        shape = mask.shape if dense_gradient else (int(mask.sum()),)
        assert found.gradients[name].shape == shape


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_neither_the_number_of_engines_nor_recomputation_changes_a_bit(precision, device):
    model, batches = compiled("gpt2", precision)
    alone, again = (step(device, model, batches, plan) for plan in plans_of(model))
    same_bits(alone, again)
    halves = [
        sweep(engine_of(device, model, EnginePlan()), EnginePlan(), model.weights(),
              batches[first : first + 2], first=first, total=4)
        for first in (0, 2)
    ]  # fmt: skip
    nodes = {s.index: [n for half in halves for n in half.nodes[s.index]]
             for s in model.program.stages}  # fmt: skip
    gradients = gradients_by_weight(model.program, nodes, 4)
    assert [loss for half in halves for loss in half.losses] == alone.losses
    for name, gradient in alone.gradients.items():
        assert torch.equal(gradient, gradients[name]), name


def test_one_token_is_multiplied(device):
    """An inference program for one token, as text generation computes it."""
    model, (rows, *_) = compiled("gpt2", training=False)
    engine = device.make_engine(model.program, EnginePlan())
    engine.begin(Batch([rows], 0, 1, 0, 0))
    weights = model.weights()
    for stage in model.program.stages:
        engine.load(stage.index, [weights[name] for name in stage.weights])
        with engine._slots.use(stage.index) as placed:
            for weight in placed:
                if isinstance(weight, ExpandedWeight) and weight.name in model.masks:
                    dense = dict(model.module.named_parameters())[weight.name].detach()
                    x = torch.randn(1, dense.shape[1])
                    assert_close(weight.multiply(x, None, False), x @ dense.t(), weight.name)
                    assert_close(weight.multiply(x @ dense.t(), None, True), x @ dense.t() @ dense,
                                 weight.name)  # fmt: skip
        engine.load(stage.index, [weights[name] for name in stage.weights])
        engine.infer(stage.index)
    ((loss, *_),) = engine.results()
    assert float(loss) == pytest.approx(float(model.loss(model.module, rows).detach()), rel=1e-5)


def test_a_changed_mask_is_taken_when_its_version_rises_and_copied_once(device, monkeypatch):
    model, batches = compiled("gpt2")
    engine = engine_of(device, model, EnginePlan())
    masks, copied = engine._slots._masks, []
    load = masks.load

    def counted(weight):
        found = load(weight)
        if found[1] is not None:
            copied.append(weight.name)
        return found

    monkeypatch.setattr(masks, "load", counted)
    for _ in range(2):
        sweep(engine, EnginePlan(), model.weights(version=3), batches)
    assert sorted(copied) == sorted(model.masks)
    shapes = {name: mask.shape for name, mask in model.masks.items()}
    others = masks_of(shapes, density=0.33, seed=5)
    changed = replace(model, module=copy.deepcopy(model.module), masks=others)
    for parameter in changed.module.parameters():
        parameter.data = torch.randn_like(parameter) / 8
    prune(changed.module, changed.masks)
    found = sweep(engine, EnginePlan(), changed.weights(version=4), batches)
    assert_is_reference(changed, found, batches)
    assert sorted(copied) == sorted([*model.masks] * 2)
    with pytest.raises(ValueError, match=r"expected \d+ values and kept entries, as version 4 of "):
        sweep(engine, EnginePlan(), model.weights(version=4), batches)


@pytest.mark.parametrize("dense_gradient", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_account_and_allocations_stay_below_the_prediction(precision, dense_gradient, device):
    model, batches = compiled("gpt2", precision)
    weights = model.weights(dense_gradient=dense_gradient)
    for plan in plans_of(model, dense_gradients=dense_gradient):
        predicted = predict_bytes(model.program, len(batches), plan, device.name).peak_bytes
        engine = device.make_engine(model.program, plan)
        for _ in range(2):
            sweep_and_let_go(engine, plan, weights, batches)
            assert engine.memory.peak_bytes <= predicted
        kept = sum(engine._layout_bytes.values())
        assert kept == most_bitmap_bytes(model.program) > 0

        def run(plan=plan, engine=engine):
            sweep_and_let_go(engine, plan, weights, batches)

        held = sum(memory.nbytes for memory in engine._slots.resident) + kept
        assert peak_allocated_bytes(run) + held <= 1.01 * predicted + 32_000


def test_the_null_engine_returns_gradients_of_the_same_shapes(device):
    model, batches = compiled("gpt2")
    for dense in (False, True):
        plan = EnginePlan(dense_gradients=dense)
        weights = model.weights(dense_gradient=dense)
        real = engine_of(device, model, plan)
        null = NullEngine(model.program, plan, expands_sparse=True)
        first, second = (sweep(engine, plan, weights, batches) for engine in (real, null))
        for name, gradient in first.gradients.items():
            assert second.gradients[name].shape == gradient.shape, name


def sparse_weight(seed, version, shape=(37, 50), density=0.3):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < density
    index = index_of_mask(mask.flatten().numpy())
    return SparseWeight("w", shape, dense[mask], index, version), dense * mask


@pytest.mark.parametrize("seed", range(20))
def test_computation_reads_its_own_mask_however_the_lanes_take_turns(seed):
    """Masks change while reads of the former ones are still queued, in the same memory."""
    lanes = RandomLanes(seed)
    slots = DeviceSlots(1 << 16, 2, lanes, DeviceMasks(lanes))
    weights = [sparse_weight(step, step) for step in range(6)]
    results, places = [], set()
    for number, (weight, dense) in enumerate(weights):
        for _ in range(2):  # the second time, the mask is there
            slots.load(number, [weight, dense])
            with slots.use(number) as (placed, other):
                found = torch.empty_like(dense)
                results.append((found, dense))
                places.add(placed._mask.bits.data_ptr())

                def read(placed=placed, other=other, found=found, dense=dense):
                    assert torch.equal(other, dense)
                    found.copy_(expand(placed._mask, placed.values))

                lanes.queue("compute", read)
            lanes.go_on_a_little()
    lanes.mark("compute").synchronize()
    assert all(torch.equal(found, dense) for found, dense in results)
    assert len(places) == 1


def test_places_of_arrivals_that_run_other_kernels_differ():
    lanes = HostLanes()
    slots = DeviceSlots(1 << 16, 1, lanes, DeviceMasks(lanes))
    first, _ = sparse_weight(0, 0)
    other, _ = sparse_weight(1, 1)

    def place(weight):
        slots.load(0, [weight])
        with slots.use(0) as (placed,):
            return placed.place

    assert place(first) == place(first)
    assert len({place(first), place(replace(first, dense_gradient=True)), place(other)}) == 3


def test_mask_memory_on_the_host_stays_until_it_is_copied():
    lanes = RandomLanes(1)
    slots = DeviceSlots(1 << 16, 2, lanes, DeviceMasks(lanes))
    weight, dense = sparse_weight(0, 0)
    slots.load(0, [weight])
    (staged,) = slots._copied_masks
    expected = staged.clone()
    slots.load(1, [dense])
    with slots.use(0) as (placed,):
        assert torch.equal(placed._mask.bits, expected)
    lanes.mark("copy").synchronize()
    assert slots._copied_masks == []


def test_masks_are_made_in_the_host_memory_that_is_counted():
    class OtherMemory(HostLanes):
        def device_memory(self, size_bytes):
            return torch.empty(size_bytes, dtype=torch.uint8)  # not traced

    weight, _ = sparse_weight(0, 0, shape=(600, 700))
    spec = WeightSpec("w", weight.shape, PACKED, True, capacity=weight.index.kept)
    stage = SimpleNamespace(name="0", weights=("w",))
    counted = mask_staging_bytes(SimpleNamespace(stages=[stage], weights={"w": spec}))
    DeviceMasks(OtherMemory()).load(weight)  # compiles
    tracemalloc.start()
    _, copied = DeviceMasks(OtherMemory()).load(weight)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert copied.nbytes == 600 * 88
    assert 0.8 * counted <= peak <= counted + 4000


def test_slots_without_masks_hand_on_those_of_the_store():
    """As for devices of a group that are CPUs."""
    lanes = RandomLanes(2)
    slots = DeviceSlots(1 << 16, 2, lanes)
    weight, _ = sparse_weight(0, 4)
    slots.load(0, [weight])
    with slots.use(0) as (placed,):
        lanes.mark("copy").synchronize()
        assert torch.equal(placed.values, weight.values)
        assert placed.values.data_ptr() != weight.values.data_ptr()
        assert (placed.index, placed.version, placed.name) == (weight.index, 4, "w")
