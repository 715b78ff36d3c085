"""Whatever a module does, Penstock trains it as plain PyTorch does, or refuses it.

Random small modules (`random_modules.py`) are trained by `Trainer` and by a plain loop. A failure
prints the seed: `RandomModule(seed)` is the module.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from plain_training import Recipe
from random_modules import ROWS, WIDTH, RandomModule
from torch import nn
from torch.nn import functional as F

from penstock import Trainer
from penstock.data import ArraySource
from penstock.errors import PenstockError
from penstock.events import StepDone
from penstock.models import InputSpec, ModelSource

STEPS, MICRO_BATCHES = 3, 2
RATE, MOMENTUM, DECAY, CLIP = 0.1, 0.9, 0.05, 0.5
FAST = range(60)
SLOW = range(60, 2060)

# What rounding may do, as a share of how far a weight has moved. The least defect that
# these modules can have is some hundred times larger.
TOLERANCE = 2e-4


@dataclass(frozen=True)
class Outcome:
    """What became of a seed: `equal`, `refused`, or `invalid` where PyTorch itself raises."""

    seed: int
    kind: str
    features: frozenset[str]
    said: str = ""


def rows(seed: int) -> ArraySource:
    random = np.random.default_rng(seed)
    names = ("x", "z", "y")
    arrays = {n: random.standard_normal((64, WIDTH)).astype(np.float32) for n in names}
    return ArraySource(arrays, seed=seed)


def plain(seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with PyTorch; return losses and weights."""
    model, source = RandomModule(seed), rows(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": DECAY},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=RATE,
        momentum=MOMENTUM,
    )
    losses, size = [], ROWS * MICRO_BATCHES
    for step in range(STEPS):
        batch = source.batch(step, range(size), size)
        total = 0.0
        for number in range(MICRO_BATCHES):
            here = slice(number * ROWS, (number + 1) * ROWS)
            part = {n: torch.from_numpy(value[here].copy()) for n, value in batch.items()}
            loss = F.mse_loss(model(part["x"], part["z"]), part["y"])
            (loss / MICRO_BATCHES).backward()
            total += float(loss.detach()) / MICRO_BATCHES
        losses.append(total)
        nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def streamed(seed: int, folder) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train with Penstock; return losses and weights."""
    spec, events = InputSpec((WIDTH,)), []
    recipe = Recipe(
        seed=seed,
        steps=STEPS,
        size=ROWS * MICRO_BATCHES,
        micro=ROWS,
        learning_rate=RATE,
        weight_decay=DECAY,
        clip_norm=CLIP,
        optimizer={
            "name": "sgd",
            "momentum": MOMENTUM,
            "schedule": {"name": "constant"},
        },
    )
    trainer = Trainer(
        recipe.config(folder, data={}),
        model=ModelSource.from_module(
            RandomModule(seed),
            loss=squared_error,
            inputs={"x": spec, "z": spec},
            targets={"y": spec},
        ),
        source=rows(seed),
        on_event=lambda event: events.append(event) if isinstance(event, StepDone) else None,
    )
    try:
        trainer.train()
        trainer.store.flush()
        weights = {name: trainer.store.master(name).clone() for name in trainer.program.weights}
    finally:
        trainer.close()
    return [event.loss for event in events], weights


def squared_error(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss [] of predictions and targets [rows, WIDTH]."""
    return F.mse_loss(output, y)


def outcome(seed: int, folder) -> Outcome:
    """Train the module of a seed both ways and compare."""
    module = RandomModule(seed)
    features = frozenset(module.features)
    try:
        losses, weights = plain(seed)
    except RuntimeError as error:
        return Outcome(seed, "invalid", features, str(error).splitlines()[0])
    start = dict(module.named_parameters())
    try:
        our_losses, our_weights = streamed(seed, folder)
    except PenstockError as error:
        return Outcome(seed, "refused", features, str(error))
    worst, name = difference(losses, weights, our_losses, our_weights, start)
    if worst > TOLERANCE:
        return Outcome(seed, "different", features, f"{worst:.1e} in {name}")
    return Outcome(seed, "equal", features, f"{worst:.1e}")


def difference(losses, weights, our_losses, our_weights, start) -> tuple[float, str]:
    """Return the largest difference, as a share of what moved, and where it is."""
    found = [(abs(a - b) / abs(a), "the losses") for a, b in zip(losses, our_losses, strict=True)]
    for name, weight in weights.items():
        if name not in our_weights:  # a further name of a weight
            continue
        moved = float((weight - start[name]).abs().max())
        off = float((our_weights[name] - weight).abs().max())
        found.append((off / max(moved, 1e-3), name))
    return max(found)


def check(seeds, folder) -> list[Outcome]:
    """Assert that no seed ends otherwise than in plain PyTorch; return how each ended."""
    found = []
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(outcome(seed, folder / str(seed)))
    different = [
        f"seed {o.seed}: {o.said}, {sorted(o.features)}" for o in found if o.kind == "different"
    ]
    assert not different, "\n".join(different)
    return found
