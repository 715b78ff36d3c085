"""Weights stream twice per step, the last stage's once, gradients once: however many micro-batches.

What must move is predicted from the module's parameters alone and counted in three places.
"""

import numpy as np
import pytest
from grids import thinned
from plain_training import Recipe, trainer_of
from tiny_models import language_model

from penstock.engine import NullEngine


def weight_bytes(case, precision):
    """Return the bytes of the parameters by stage: before, in and after the blocks."""
    size = {"fp32": 4, "bf16": 2}[precision]
    model = case.plain(0)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    embed = blocks = head = 0
    for name, parameter in model.named_parameters():
        count = parameter.numel() * size
        if any(part.isdigit() for part in name.split(".")):
            blocks += count
        elif "embed" in name or "wte" in name or "wpe" in name:
            embed += count
        else:
            head += count
    if tied:
        head += model.get_input_embeddings().weight.numel() * size
    return embed, blocks, head


@pytest.mark.parametrize(
    ("family", "micro_batches", "precision"),
    thinned(["gpt2", "llama"], [1, 8], ["fp32", "bf16"], others=pytest.mark.long),
)
def test_weights_stream_twice_and_gradients_once(family, micro_batches, precision, tmp_path):
    case = language_model(family)
    recipe = Recipe(steps=3, warmup_steps=0, size=8, micro=8 // micro_batches)
    trainer, events = trainer_of(
        case, recipe, tmp_path, precision=precision, engine={"recompute": "always"}
    )
    trainer.train()
    embed, blocks, head = weight_bytes(case, precision)
    # Where only inputs come in, nothing is differentiated further and nothing but gradients of
    # the weights themselves is made: an embedding needs its weight no second time unless it is
    # recomputed, which a stage that saves nothing never is.
    least, most = embed + 2 * blocks + head, 2 * embed + 2 * blocks + head
    scale = 4 if precision == "fp32" else 2
    gradients = (embed + blocks + head) // scale * 4  # sums travel in float32
    for event in events:
        assert least <= event.streamed_bytes <= most
        assert event.gradient_bytes == gradients
    assert trainer.fabric.traffic.broadcast_bytes == sum(e.streamed_bytes for e in events)
    assert trainer.fabric.traffic.reduced_bytes == sum(e.gradient_bytes for e in events)


@pytest.mark.long
def test_traffic_is_independent_of_micro_batches_and_engines(tmp_path):
    case, found = language_model("gpt2"), set()
    for micro_batches, engines in ((1, 1), (4, 3), (8, 1), (8, 4)):
        recipe = Recipe(steps=2, warmup_steps=0, size=8, micro=8 // micro_batches)
        folder = tmp_path / f"{micro_batches}-{engines}"
        trainer, events = trainer_of(case, recipe, folder, engines=engines)
        trainer.train()
        found.add((events[-1].streamed_bytes, events[-1].gradient_bytes))
    assert len(found) == 1


def test_weights_that_backward_does_not_read_stream_once(tmp_path):
    case = language_model("gpt2")
    moved = {}
    for kind in ("never", "always"):
        recipe = Recipe(steps=2, warmup_steps=0)
        trainer, events = trainer_of(case, recipe, tmp_path / kind, engine={"recompute": kind})
        trainer.train()
        moved[kind] = events[-1].streamed_bytes
    assert moved["never"] <= moved["always"]


@pytest.mark.long
def test_frozen_weights_send_nothing_back(tmp_path):
    case = language_model("llama")
    recipe = Recipe(steps=2, warmup_steps=0, freeze=("model.layers.*",))
    trainer, events = trainer_of(case, recipe, tmp_path)
    trainer.train()
    embed, _, head = weight_bytes(case, "fp32")
    assert events[-1].gradient_bytes == embed + head


@pytest.mark.long
def test_weights_below_the_trainable_layers_stream_once(tmp_path):
    case = language_model("llama")
    recipe = Recipe(steps=2, warmup_steps=0)
    trainer, events = trainer_of(
        case, recipe, tmp_path, train=["model.layers.1.*"], engine={"recompute": "always"}
    )
    trainer.train()
    embed, blocks, head = weight_bytes(case, "fp32")
    block = blocks // 2
    assert events[-1].streamed_bytes == embed + block + 2 * block + head
    assert events[-1].gradient_bytes == block


def test_an_engine_without_arithmetic_moves_the_same_bytes(tmp_path):
    case, recipe = language_model("gpt2"), Recipe()  # whose first step has a rate of zero
    trainer, events = trainer_of(case, recipe, tmp_path / "real")
    trainer.run_step()
    null, seen = trainer_of(case, recipe, tmp_path / "null")
    null.engines[:] = [NullEngine(null.program, null._layout.plan) for _ in null.engines]
    null.run_step()
    assert seen[0].streamed_bytes == events[0].streamed_bytes
    assert seen[0].gradient_bytes == events[0].gradient_bytes
    assert seen[0].loss == 0.0
    assert np.isfinite(seen[0].grad_norm)
