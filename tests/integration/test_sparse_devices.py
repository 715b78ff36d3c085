"""Sparse training on devices that expand weights, and in groups of devices.

A device is simulated on the CPU, by the functions that a GPU runs; where there are GPUs, the tests
run on these too. A group of CPUs computes with sparse kernels.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from masked_training import Change, masked_training
from plain_training import ORDERS, ROUNDING, Recipe, distance, trainer_of
from simulated_device import simulate
from sparse_choices import chosen
from tiny_models import language_model

from penstock.engine import TARGETS, predict_bytes, target_of

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
EXPANDING = ["simulated", *(["cuda"] if GPUS else [])]
GROUPS = {
    "cpu": ["cpu"] * 3,
    "simulated": ["cpu"] * 3,
    "cuda": [f"cuda:{number}" for number in range(min(GPUS, 3))],
}
STEPS, EVERY, END = 6, 3, 6
RECIPE = Recipe(steps=STEPS, warmup_steps=1)
SPARSITY = {
    "method": "rigl",
    "sparsity": 0.8,
    "update_every": EVERY,
    "update_end": END,
    "weights": ["*.h.*.weight", "*wte*"],  # the embedding is the head too
    "keep_dense": ["*.ln_*"],
}


@pytest.fixture(autouse=True)
def deterministic_as_before():
    was = torch.are_deterministic_algorithms_enabled()
    with chosen():
        yield
    torch.use_deterministic_algorithms(was)


@pytest.fixture(scope="module")
def simulated():
    """The simulated device; programs for it are compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        yield simulate(patch)


def started(folder, kind, until=None, devices=None, **changes):
    """Return a trainer, and the list into which its steps will go."""
    engine = {"devices": devices, **changes.pop("engine", {})}
    engine["device"] = "auto" if kind == "simulated" else kind
    with pytest.MonkeyPatch.context() as patch:
        if kind == "simulated":  # PyTorch knows its memory as that of the CPU
            patch.setitem(TARGETS, "cpu", TARGETS[kind])
        trainer, events = trainer_of(
            language_model("gpt2"),
            RECIPE,
            folder,
            until,
            engine=engine,
            sparsity=SPARSITY,
            **changes,
        )
    assert trainer._layout.device == kind
    return trainer, events


def trained(folder, kind, **options):
    """Train; return the losses and norms, and the hash of the weights."""
    trainer, events = started(folder, kind, **options)
    trainer.train()
    return bits(trainer, events)


def bits(trainer, events):
    found = [(e.loss, e.grad_norm, e.sparsity) for e in events], trainer.store.content_hash()
    trainer.close()
    return found


def masks_of(trainer):
    return {
        name: torch.from_numpy(trainer.store.mask(name).mask()).view(spec.shape)
        for name, spec in trainer.program.weights.items()
        if spec.is_sparse
    }


def exchange(step, masks):
    """The counts of RigL: a share of the kept entries, by a cosine until the end."""
    fraction = 0.3 * 0.5 * (1 + math.cos(math.pi * step / END))
    if step != EVERY:
        return None
    present = {name: int(mask.sum()) for name, mask in masks.items()}
    counts = {
        name: (min(int(fraction * count), masks[name].numel() - count),) * 2
        for name, count in present.items()
    }
    return Change(counts, by_gradient=True, replaces_update=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, simulated):
    """Return the bits of a run on one device, by kind and precision; made once."""

    @functools.cache
    def run(kind, precision="fp32"):
        return trained(tmp_path_factory.mktemp("whole"), kind, precision=precision)

    return run


@pytest.mark.long
@pytest.mark.parametrize("kind", EXPANDING)
def test_steps_agree_with_a_masked_dense_model(kind, simulated, tmp_path):
    trainer, events = started(tmp_path, kind)
    masks = [masks_of(trainer)]
    while trainer.step < STEPS:
        trainer.run_step()
        masks.append(masks_of(trainer))
    assert target_of(trainer._layout.device).expands_sparse
    assert "transformer.wte.weight" in masks[0]
    case = language_model("gpt2")
    reference = masked_training(case, RECIPE, masks, exchange)
    other = masked_training(case, RECIPE, masks, exchange, ORDERS[0])
    assert [event.loss for event in events] == pytest.approx(reference.losses, rel=5e-6)
    assert [event.step for event in events if event.changed_entries] == [EVERY]
    trainer.store.flush()
    for name, weight in reference.weights.items():
        if not name.endswith("attn.c_attn.bias"):  # rounding noise in updates of full size
            yardstick = distance(other.weights[name], weight)
            assert distance(trainer.store.master(name), weight) <= 10 * yardstick + ROUNDING, name
    layout = trainer._layout
    predicted = predict_bytes(layout.program, layout.micro_batches, layout.plan, kind).peak_bytes
    assert 0 < trainer.engines[0].memory.peak_bytes <= predicted
    assert trainer._layout.sparse_weights.products.as_record() == []


@pytest.mark.parametrize(
    ("kind", "precision"),
    [("simulated", "fp32"), *(("cuda", precision) for precision in ("fp32", "bf16") if GPUS)],
)
def test_resuming_recomputing_and_more_engines_keep_every_bit(kind, precision, whole, tmp_path):
    steps, weights = whole(kind, precision)
    first, _ = trained(tmp_path, kind, until=4, precision=precision)
    other = {"engines": 2, "engine": {"recompute": "always"}}
    rest, last = trained(tmp_path, kind, precision=precision, **other)
    assert (first + rest, last) == (steps, weights)


@pytest.mark.parametrize("kind", ["cpu", *EXPANDING])
def test_a_group_of_devices_has_the_bits_of_one(kind, whole, tmp_path):
    """Four micro-batches on three devices: gradients of steps with dense ones are exchanged too."""
    trainer, events = started(tmp_path, kind, devices=GROUPS[kind])
    assert len(trainer.engines) == len(GROUPS[kind])
    trainer.train()
    assert bits(trainer, events) == whole(kind)


@pytest.mark.parametrize("kind", ["cpu", *EXPANDING])
def test_an_error_on_one_device_of_a_group_ends_only_the_step(kind, whole, tmp_path):
    """The step with dense gradients, whose exchange the failed device takes part in."""
    trainer, events = started(tmp_path, kind, devices=GROUPS[kind])
    for _ in range(2):
        trainer.run_step()
    engine = trainer.engines[-1]._member.engine
    backward = engine.backward

    def fails(stage):
        engine.backward = backward
        raise MemoryError(f"no room for stage {stage}")

    engine.backward = fails
    with pytest.raises(MemoryError, match="no room for stage"):
        trainer.run_step()
    while trainer.step < STEPS:
        trainer.run_step()
    assert bits(trainer, events) == whole(kind)


@pytest.mark.parametrize("kind", EXPANDING)
def test_evaluation_uses_the_masks_of_the_moment(kind, simulated, tmp_path):
    trainer, events = started(tmp_path, kind)
    for _ in range(2):
        trainer.run_step()
    before = trainer.evaluate(2)["loss"]
    trainer.run_step()  # changes masks and nothing else
    assert events[-1].changed_entries > 0
    after = trainer.evaluate(2)["loss"]
    assert math.isfinite(before)
    assert after != before
    assert trainer.evaluate(2)["loss"] == after
