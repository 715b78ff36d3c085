"""bfloat16 streaming strays from the float32 run at most twice as far as autocast does.

Both round products to bfloat16. Penstock also streams embeddings and norms in it and keeps the
values between stages in it, which autocast leaves in float32.
"""

import math

import pytest
import torch
from grids import quick_first
from plain_training import Recipe, plain, streamed, trainer_of
from tiny_models import CASES

SEEDS = (0, 1)


def strayed(run, reference, start):
    """Return how far a run is from the reference: losses (absolute), weights (share of travel)."""
    losses = math.sqrt(
        sum((a - b) ** 2 for a, b in zip(run.losses, reference.losses, strict=True))
        / len(reference.losses)
    )
    apart = sum(float((run.weights[n] - w).square().sum()) for n, w in reference.weights.items())
    moved = sum(float((start[n] - w).square().sum()) for n, w in reference.weights.items())
    return losses, math.sqrt(apart / moved)


def root_mean_square(values):
    return math.sqrt(sum(value * value for value in values) / len(values))


@pytest.mark.parametrize(
    "name", quick_first(["gpt2", "bert", "classifier", "llama"], ["classifier"])
)
def test_bfloat16_error_is_at_most_twice_that_of_autocast(name, tmp_path):
    ours, theirs, size = [], [], 0.0
    for seed in SEEDS:
        case, recipe = CASES[name](), Recipe(seed=seed)
        start = {n: p.detach() for n, p in case.plain(seed).named_parameters()}
        reference = plain(case, recipe)
        size = max(size, *reference.losses)
        run = streamed(case, recipe, tmp_path / str(seed), precision="bf16")
        ours.append(strayed(run, reference, start))
        theirs.append(strayed(plain(case, recipe, autocast=torch.bfloat16), reference, start))
    (our_losses, our_weights), (losses, weights) = (
        [root_mean_square(column) for column in zip(*rows, strict=True)] for rows in (ours, theirs)
    )
    assert our_weights <= 2 * weights
    # A loss is a mean over a hundred tokens, so it strays by far less than bfloat16's 2**-9.
    assert our_losses <= max(2 * losses, 2**-12 * size)


@pytest.mark.long
def test_bfloat16_weights_stream_as_upper_half_of_float32_masters(tmp_path):
    case, recipe = CASES["gpt2"](), Recipe(steps=6)
    trainer, _ = trainer_of(case, recipe, tmp_path, precision="bf16")
    trainer.train()
    for stage in trainer.program.stages:
        for name, weight in zip(stage.weights, trainer.store.fetch(stage.index), strict=True):
            assert weight.dtype == torch.bfloat16
            master = trainer.store.master(name)
            # Nearest, as in torch, except that ties go away from zero.
            bits = master.view(torch.int32)
            nearest = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
            assert torch.equal(weight, nearest)
            same = weight == master.to(torch.bfloat16)
            assert bool(((bits & 0xFFFF) == 0x8000)[~same].all())
            assert not torch.equal(weight.float(), master)
