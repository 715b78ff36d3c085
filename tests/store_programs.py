"""Small programs for tests of the store: stages and weights by hand, nothing that computes."""

import dataclasses

import numpy as np
import torch

from penstock.program import Kind, Program, Stage, TensorSpec, WeightSpec
from penstock.sparsity import max_compact_bytes
from penstock.store import AdamW, CommitRule, DramStore, GroupSettings, Schedule
from penstock.store.flash import FlashStore
from penstock.weight_formats import BFLOAT16, format_of


def _refuse(*tensors):
    raise AssertionError("a store test must not run the program")


CONSTANT = Schedule("constant", peak=1e-2)
SMALL_BLOCK = 2048  # of a store on flash: many weights have several blocks then

_EMPTY = {"Executable": _refuse, "int": 0}
_NOTHING = {
    field.name: _EMPTY.get(field.type, ())
    for field in dataclasses.fields(Kind)
    if field.default_factory is dataclasses.MISSING
}
"""What a kind needs to be made and the store never looks at."""


def make_program(
    layers, frozen=(), stream_dtype=torch.float32, name="small", narrow=(), sparse=None
):
    """Return a program from `[{weight: shape, ...}, ...]`, one table per stage.

    A weight that appears in several stages is tied; those named in `frozen` are not trained, and
    of these those in `narrow` are kept as bfloat16. `sparse` gives the capacity of sparse weights.
    """
    sparse = sparse or {}
    weights, stages = {}, []
    for index, layer in enumerate(layers):
        for weight, shape in layer.items():
            form = format_of(stream_dtype, weight in narrow, weight in sparse)
            spec = WeightSpec(weight, shape, form, weight not in frozen)
            if weight in sparse:
                most = max_compact_bytes(sparse[weight], spec.elements)
                spec = dataclasses.replace(spec, capacity=sparse[weight], index_bytes=most)
            weights[weight] = spec
        kind = Kind(
            **_NOTHING
            | {
                "name": f"kind{index}",
                "digest": f"digest{index}",
                "weights": tuple(TensorSpec(s, weights[n].stream_dtype) for n, s in layer.items()),
                "trainable": tuple(weight not in frozen for weight in layer),
            }
        )
        stages.append(Stage(index, f"stage{index}", kind, tuple(layer), (), ()))
    return Program(name, tuple(stages), weights, {}, (), {}, None, (), (), ())


LAYERS = (
    {"embed": (50, 16), "position": (7, 16)},
    {"block.0.weight": (33, 17), "block.0.bias": (33,)},
    {"block.1.weight": (64, 40), "block.1.bias": (1,), "block.1.scale": ()},
    {"norm": (16,), "embed": (50, 16)},
)
"""Sizes that fill no vector and no cache line; `embed` is tied; `block.1.scale` is a scalar."""


def random_weights(program, seed):
    """Return float32 weights for a program, by name; bfloat16 values where these are kept."""
    generator = np.random.default_rng(seed)
    found = {}
    for name, spec in program.weights.items():
        values = torch.from_numpy(np.asarray(generator.standard_normal(spec.shape), np.float32))
        found[name] = values.bfloat16().float() if spec.format is BFLOAT16 else values
    return found


def random_gradients(program, generator, scale=1.0):
    """Return, per stage, float32 gradients of its trainable weights in stage order."""
    return {
        stage.index: [
            torch.from_numpy(
                np.asarray(
                    generator.standard_normal(program.weights[name].shape) * scale, np.float32
                )
            )
            for name in stage.weights
            if program.weights[name].trainable
        ]
        for stage in program.stages
    }


def send(store, gradients):
    """Hand gradients to a store as a backward sweep does: the last stage first."""
    for stage in sorted(gradients, reverse=True):
        if gradients[stage]:
            store.receive(stage, gradients[stage])


def forward_sweep(store):
    """Fetch every stage once, in order, and return copies of what streamed, by weight."""
    seen = {}
    for stage in store.program.stages:
        for name, view in zip(stage.weights, store.fetch(stage.index), strict=True):
            seen[name] = view.clone()
    return seen


def training_store(
    program,
    precision="fp32",
    *,
    clip_norm=None,
    gradient_dtype=torch.float32,
    schedule=CONSTANT,
    optimizer=None,
    weight_decay=0.1,
    masks=None,
):
    """Return a `DramStore` with the same settings for all weights, by default of AdamW."""
    settings = GroupSettings(learning_rate_scale=1.0, weight_decay=weight_decay, group=None)
    return DramStore(
        program,
        precision,
        optimizer or AdamW(0.9, 0.95, 1e-8),
        dict.fromkeys(program.weights, settings),
        CommitRule(schedule, clip_norm),
        gradient_dtype,
        masks,
    )


def flash_store(program, folder, *, optimizer=None, dram_bytes=300_000, clip_norm=None, **options):
    """Return a `FlashStore` with the settings of `training_store`, in small blocks.

    `options` go to the store as they are. Whoever makes it closes it.
    """
    settings = GroupSettings(learning_rate_scale=1.0, weight_decay=0.1, group=None)
    return FlashStore(
        program,
        folder,
        optimizer=optimizer or AdamW(0.9, 0.95, 1e-8),
        groups=dict.fromkeys(program.weights, settings),
        rule=CommitRule(CONSTANT, clip_norm),
        dram_bytes=dram_bytes,
        **{"block_elements": SMALL_BLOCK, **options},
    )


def train(store, steps, seed, scale=1.0):
    """Run some steps on random gradients that depend on seed and step alone; return the commits."""
    commits = []
    for _ in range(steps):
        forward_sweep(store)
        generator = np.random.default_rng([seed, store.step])
        send(store, random_gradients(store.program, generator, scale))
        commits.append(store.commit())
    return commits
