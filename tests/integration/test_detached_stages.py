"""Stages whose outputs are all detached: a weight trains in another stage, and serves as a target
here, as in self-distillation."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock import Trainer
from penstock.data import ArraySource
from penstock.errors import NoTrainingError
from penstock.models import ModelSource

WIDTH, ROWS, MICRO, STEPS, RATE = 6, 8, 4, 3, 0.1


class Distills(nn.Module):
    """Layers that first run without gradients, and then learn from what they made."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.outlet = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.no_grad():
            target = x
            for layer in self.layers:
                target = torch.tanh(layer(target))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.outlet(x) - target, target.argmax(1)


class TakesTargetsOnly(Distills):
    def forward(self, x):
        with torch.no_grad():
            target = torch.tanh(self.layers[0](x))
        return self.outlet(self.layers[2](self.layers[1](x))) - target, target.argmax(1)


def loss(output, y):
    difference, likeliest = output
    return F.mse_loss(difference, y) + F.cross_entropy(difference, likeliest)


def rows():
    random = torch.Generator().manual_seed(3)
    return {name: torch.randn(ROWS * STEPS, WIDTH, generator=random) for name in ("x", "y")}


def run(model, folder, **sections):
    arrays = rows()
    trainer = Trainer(
        {
            "batch": {"size": ROWS, "micro": MICRO},
            "optimizer": {
                "name": "sgd",
                "learning_rate": RATE,
                "momentum": 0.0,
                "weight_decay": 0.0,
                "clip_norm": None,
                "schedule": {"name": "constant"},
            },
            "run": {"dir": str(folder), "steps": STEPS},
            **sections,
        },
        model=ModelSource.from_module(
            model, loss=loss, inputs={"x": arrays["x"][:1]}, targets={"y": arrays["y"][:1]}
        ),
        source=ArraySource({name: value.numpy() for name, value in arrays.items()}),
        quiet=True,
    )
    try:
        trainer.train()
        trainer.store.flush()
        return {name: trainer.store.master(name).clone() for name in trainer.program.weights}
    finally:
        trainer.close()


def plain(model):
    arrays = {name: value.numpy() for name, value in rows().items()}
    source, optimizer = ArraySource(arrays), torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        batch = source.batch(step, range(ROWS), ROWS)
        for part in (slice(0, MICRO), slice(MICRO, ROWS)):
            x, y = (torch.from_numpy(batch[name][part].copy()) for name in ("x", "y"))
            (loss(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize("recompute", ["auto", "always"])
@pytest.mark.parametrize("place", ["memory", "flash"])
def test_weight_that_is_also_used_detached_trains_as_in_pytorch(tmp_path, place, recompute):
    torch.manual_seed(0)
    model, reference = Distills(), Distills()
    reference.load_state_dict(model.state_dict())
    sections = {"engine": {"recompute": recompute}}
    if place == "flash":
        sections["store"] = {"flash": {"path": str(tmp_path / "flash")}}
    found = run(model, tmp_path / "run", **sections)
    for name, weight in plain(reference).items():
        assert torch.allclose(found[name], weight, rtol=0, atol=1e-6), name


def test_weight_that_is_only_used_detached_is_named(tmp_path):
    with pytest.raises(NoTrainingError) as caught:
        run(TakesTargetsOnly(), tmp_path / "run")
    assert str(caught.value) == (
        "step 1: no gradient for trainable weights layers.0.weight, layers.0.bias: the loss does "
        "not depend on it; freeze weights that should not train, or use them in the loss"
    )
