"""Weights that do not train are named by their gradients, at the default settings.

No test here sets a weight decay: the default one changes every matrix, trained or not.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.data import ArraySource
from penstock.models import ModelSource
from penstock.telemetry.events import Notice, StepDone
from penstock.training.trainer import Trainer

ROWS, WIDTH = 64, 96  # wide enough for a store in shards to cut the matrices
IDLE = (
    "2 weight(s) do not train: their gradient was zero in every element in {} steps, and only "
    "weight decay changes them: idle.weight, idle.bias. Freeze them by name, or find out why the "
    "loss does not depend on them"
)


class HalfZero(nn.Module):
    """A branch that the loss reads, and whose gradient is exactly zero."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(6, WIDTH), nn.Linear(6, 40 * WIDTH)

    def forward(self, x):
        return self.used(x).square().mean() + (0.0 * self.idle(x)).mean()


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class ReZero(nn.Module):
    """x + alpha f(x), alpha 0 at first (Bachlechner et al., ReZero Is All You Need, 2020)."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(Branch() for _ in range(3))
        self.alphas = nn.ParameterList(nn.Parameter(torch.zeros(())) for _ in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for branch, alpha in zip(self.branches, self.alphas, strict=True):
            x = x + alpha * branch(x)
        return self.head(x)


class ZeroProjection(nn.Module):
    """Residual blocks whose last projection is zero at first, and so is the head."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(Branch() for _ in range(2))
        self.head = nn.Linear(6, 2)
        for layer in (*(branch.down for branch in self.branches), self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x)


class AdaLNZero(nn.Module):
    """Shift, scale and gate are made of a condition by a layer that is zero at first.

    Peebles and Xie, Scalable Diffusion Models with Transformers, 2022; the final layer too.
    """

    def __init__(self):
        super().__init__()
        self.condition = nn.Linear(6, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(6, elementwise_affine=False) for _ in range(2))
        self.modulations = nn.ModuleList(nn.Linear(8, 18) for _ in range(2))
        self.branches = nn.ModuleList(Branch() for _ in range(2))
        self.head = nn.Linear(6, 2)
        for layer in (*self.modulations, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        condition = F.silu(self.condition(x))
        for norm, modulation, branch in zip(
            self.norms, self.modulations, self.branches, strict=True
        ):
            shift, scale, gate = modulation(condition).chunk(3, dim=-1)
            x = x + gate * branch(norm(x) * (1 + scale) + shift)
        return self.head(x)


def squared_error(output, y):
    return F.mse_loss(output, y)


def rows():
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, 6)).astype(np.float32)
    return {"x": x, "y": np.stack([np.sin(x).sum(1), x.prod(1)], axis=1)}


def run(module, folder, *, steps=8, source=None, model=None, **changes):
    """Train at the defaults; return the trainer, the notices and the losses."""
    told, losses = [], []

    def listen(event):
        if isinstance(event, Notice):
            told.append(event.text)
        elif isinstance(event, StepDone):
            losses.append(event.loss)

    config = {
        "batch": {"size": 8, "micro": 8},
        "evaluation": {"every": None},
        "engine": {"threads": 1},
        "run": {"dir": str(folder), "steps": steps},
    }
    for name, value in changes.items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    trainer = Trainer(
        config,
        model=model or (source_of(module) if module is not None else None),
        source=source or ArraySource(rows()),
        on_event=listen,
    )
    trainer.train()
    return trainer, told, losses


def source_of(module):
    x, y = (torch.from_numpy(value) for value in rows().values())
    if isinstance(module, HalfZero):
        return ModelSource.from_module(module, inputs={"x": x[:1]})
    return ModelSource.from_module(
        module, loss=squared_error, inputs={"x": x[:1]}, targets={"y": y[:1]}
    )


def test_zero_gradient_weights_are_named_once_with_default_settings(tmp_path):
    torch.manual_seed(0)
    module = HalfZero()
    trainer, told, losses = run(module, tmp_path, source=ArraySource({"x": rows()["x"]}))
    assert len(losses) == 8  # the run goes on
    assert told == [IDLE.format(5)]
    # What hid them from a comparison of bytes: they have changed.
    assert not torch.equal(trainer.store.master("idle.weight"), module.idle.weight)


def test_short_run_is_checked_on_its_available_steps(tmp_path):
    _, told, _ = run(HalfZero(), tmp_path, steps=3, source=ArraySource({"x": rows()["x"]}))
    assert told == [IDLE.format(3)]


def test_steps_at_a_learning_rate_of_zero_do_not_count(tmp_path):
    optimizer = {"schedule": {"name": "cosine", "warmup_steps": 4}}
    data = ArraySource({"x": rows()["x"]})
    _, told, _ = run(HalfZero(), tmp_path, steps=5, source=data, optimizer=optimizer)
    assert told == [IDLE.format(4)]  # the first of a warm-up is at zero


@pytest.mark.parametrize(
    "changes",
    [
        {"store": {"shards": 3}},
        {"store": {"flash": {"path": "flash"}}},
        {"store": {"shards": 2, "flash": {"path": "flash"}}},
        {"precision": "bf16"},
        {"optimizer": {"moments": "8bit"}},
    ],
    ids=str,
)
def test_zero_gradient_weights_are_named_by_every_store(changes, tmp_path):
    if "flash" in changes.get("store", {}):
        changes = {"store": {**changes["store"], "flash": {"path": str(tmp_path / "flash")}}}
    data = ArraySource({"x": rows()["x"]})
    _, told, _ = run(HalfZero(), tmp_path / "run", source=data, **changes)
    assert told == [IDLE.format(5)]


def test_resumed_run_is_checked_again(tmp_path):
    torch.manual_seed(0)
    module, data = HalfZero(), ArraySource({"x": rows()["x"]})
    constant = {"schedule": {"name": "constant"}}
    for steps in (6, 12):
        _, told, losses = run(module, tmp_path, steps=steps, source=data, optimizer=constant)
        assert told == [IDLE.format(5)]
        assert len(losses) == 6


@pytest.mark.parametrize("made", [ReZero, ZeroProjection, AdaLNZero])
def test_zero_initialised_blocks_train_as_in_plain_pytorch(made, tmp_path):
    """Some of their gradients are zero in the first step, and the run is neither ended nor told."""
    torch.manual_seed(0)
    module = made()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    data, steps = ArraySource(rows()), 12
    trainer, told, losses = run(module, tmp_path, steps=steps, source=data)
    assert told == []
    settings = trainer.config.optimizer
    plain = made()
    plain.load_state_dict(start)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.dim() >= 2]},
            {"params": [p for p in plain.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.0,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    idle_at_first = 0
    for step in range(steps):
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))  # the default schedule
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (0.1 + 0.9 * cosine)
        batch = data.batch(step, range(8), 8)
        x, y = torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])
        loss = squared_error(plain(x), y)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            idle_at_first = sum(not p.grad.any() for p in plain.parameters())
        nn.utils.clip_grad_norm_(plain.parameters(), settings.clip_norm)
        optimizer.step()
        assert losses[step] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert idle_at_first > 0
    for name, value in plain.named_parameters():
        assert not torch.equal(value, start[name])
        torch.testing.assert_close(trainer.store.master(name), value.detach(), rtol=1e-3, atol=2e-5)


def test_unread_embedding_rows_give_no_notice(tmp_path):
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5000, 6), nn.Linear(6, 1)

        def forward(self, ids):
            return self.head(self.embed(ids)).square().mean()

    data = ArraySource({"ids": np.full((ROWS, 4), 4999)})
    model = ModelSource.from_module(Sums(), inputs={"ids": torch.zeros(1, 4, dtype=torch.int64)})
    _, told, _ = run(None, tmp_path, model=model, source=data, store={"shards": 3})
    assert told == []


def test_updates_lost_to_rounding_are_named(tmp_path):
    """1 - 1e-9 is 1 in float32, in plain PyTorch as well."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(6)

        def forward(self, x):
            return self.norm(x)[:, :2]

    rate = {"learning_rate": 1e-9, "schedule": {"name": "constant"}}
    trainer, told, _ = run(Normed(), tmp_path, optimizer=rate)
    assert torch.equal(trainer.store.master("norm.weight"), torch.ones(6))
    assert told == [
        "1 weight(s) have not changed in 5 steps: every update was too small for their precision, "
        "at a learning rate of 1e-09: norm.weight. Raise optimizer.learning_rate, unless a warm-up "
        "raises it"
    ]
