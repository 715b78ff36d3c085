"""Train and eval mode: each part trains in the mode in which its author left it.

The reference is a plain PyTorch loop over the same rows, its modules in the modes that are meant.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.data import ArraySource
from penstock.errors import CompileError
from penstock.models import ModelSource
from penstock.telemetry.events import Evaluated, Notice, StepDone
from penstock.training.trainer import Trainer

STEPS, ROWS = 6, 64


class Backbone(nn.Module):
    """What a frozen backbone has: dropout, a batch norm, and a branch on the mode."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 8)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.5)

    def forward(self, x):
        x = self.dropout(self.norm(torch.tanh(self.first(x))))
        return self.second(x) * (3.0 if self.training else 1.0)


class Head(nn.Module):
    """A part that is trained; what it computes depends on its own mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 2)

    def forward(self, x):
        return self.linear(x) + (0.5 if self.training else 0.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = Backbone(), Head()
        random = torch.Generator().manual_seed(3)
        self.backbone.norm.running_mean.normal_(generator=random)
        self.backbone.norm.running_var.uniform_(0.5, 2.0, generator=random)

    def forward(self, x):
        return self.head(self.backbone(x))


class Branches(nn.Module):
    """Without dropout: another factor in each mode, and a head with a branch of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.head = nn.Linear(6, 8), Head()

    def forward(self, x):
        return self.head(self.linear(x) * (2.0 if self.training else 1.0))


class Plain(nn.Module):
    """The same in either mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def loss(output, y):
    return F.mse_loss(output, y)


def rows(seed):
    random = np.random.default_rng(seed)
    x = random.standard_normal((ROWS, 6)).astype(np.float32)
    return {"x": x, "y": np.stack([np.sin(x).sum(1), x.prod(1)], axis=1)}


def trainer_of(module, folder, **changes):
    """Return a trainer at the defaults, and the list of its events."""
    events = []
    x, y = (torch.from_numpy(value) for value in rows(0).values())
    config = {
        "batch": {"size": 8, "micro": 8},
        "evaluation": {"every": None},
        "engine": {"threads": 1},
        "run": {"dir": str(folder), "steps": STEPS},
        **changes,
    }
    trainer = Trainer(
        config,
        model=ModelSource.from_module(module, loss=loss, inputs={"x": x[:1]}, targets={"y": y[:1]}),
        source=ArraySource(rows(0)),
        held_out=ArraySource(rows(1)),
        on_event=events.append,
    )
    return trainer, events


def plain_losses(model, trainer):
    """Train `model`, whose modules are in the modes that are meant, with the trainer's settings."""
    settings, data = trainer.config.optimizer, ArraySource(rows(0))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.dim() >= 2]},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ],
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    losses = []
    for step in range(STEPS):
        batch = data.batch(step, range(8), 8)
        found = loss(model(torch.from_numpy(batch["x"])), torch.from_numpy(batch["y"]))
        optimizer.zero_grad()
        found.backward()
        nn.utils.clip_grad_norm_(trained, settings.clip_norm)
        for group in optimizer.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
            group["lr"] = settings.learning_rate * (0.1 + 0.9 * cosine)
        optimizer.step()
        losses.append(float(found.detach()))
    return losses


def assert_trained_like(module, reference, folder, **changes):
    trainer, events = trainer_of(module, folder, **changes)
    trainer.evaluate(batches=1)  # all in eval mode; training must not notice
    trainer.train()
    losses = [event.loss for event in events if isinstance(event, StepDone)]
    assert losses == pytest.approx(plain_losses(reference, trainer), rel=1e-5)
    for name, value in reference.named_parameters():
        torch.testing.assert_close(trainer.store.master(name), value.detach(), rtol=1e-4, atol=1e-5)
    held_out = rows(1)
    reference.eval()
    with torch.no_grad():
        expected = loss(reference(torch.from_numpy(held_out["x"])), torch.from_numpy(held_out["y"]))
    assert trainer.evaluate(batches=8)["loss"] == pytest.approx(float(expected), rel=1e-4)
    return trainer, [event.text for event in events if isinstance(event, Notice)]


def built(kind, seed=0):
    torch.manual_seed(seed)
    return kind()


@pytest.mark.parametrize("frozen", [True, False])
def test_part_in_eval_mode_stays_in_eval_mode_while_training(frozen, tmp_path):
    """Its dropout and its batch norm's statistics are those of eval mode."""
    module, reference = built(Net), built(Net)
    for model in (module, reference):
        model.backbone.eval()
        model.backbone.requires_grad_(not frozen)
    _, told = assert_trained_like(module, reference, tmp_path)
    said = [
        "backbone: given in eval mode and trained in eval mode, without dropout. To train in train "
        "mode, call .train() on the whole model before you pass it to the trainer"
    ]
    assert told == ([] if frozen else said)
    assert not module.backbone.training  # what was handed over is not changed
    assert module.head.training


def test_batch_norm_in_eval_mode_trains_beside_a_mode_branch(tmp_path):
    module, reference = built(Net), built(Net)
    for model in (module, reference):
        model.backbone.norm.eval()
        model.backbone.dropout.p = 0.0
    assert_trained_like(module, reference, tmp_path)


def test_a_model_in_eval_mode_is_trained_in_train_mode_as_a_whole(tmp_path):
    """`from_pretrained` returns models in eval mode; a head that is put on is in train mode."""
    for number, whole in enumerate([True, False]):
        module, reference = built(Branches), built(Branches)
        module.eval()
        if not whole:
            module.head.train()
        assert_trained_like(module, reference.train(), tmp_path / str(number))


@pytest.mark.long
def test_a_transformers_model_in_eval_mode_trains_with_its_dropout(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    given = built(lambda: GPT2LMHeadModel(config))
    given.save_pretrained(tmp_path / "pretrained")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "pretrained")
    assert not model.training
    tokens = np.random.default_rng(0).integers(64, size=(16, 8))
    data = ArraySource({"input_ids": tokens, "labels": tokens})
    for number, (part, draws) in enumerate([(None, True), (model.transformer, False)]):
        if part is not None:
            model.train()
            part.eval()
        trainer = Trainer(
            {
                "data": {"sequence_length": 8},
                "batch": {"size": 4},
                "evaluation": {"every": None},
                "run": {"dir": str(tmp_path / str(number)), "steps": 1},
            },
            model=model,
            source=data,
        )
        assert trainer.program.draws_dropout is draws
        trainer.close()


def test_a_factory_keeps_the_modes_of_its_model(tmp_path):
    source = ModelSource.from_factory(
        "test_modes:frozen_backbone",
        loss="test_modes:loss",
        inputs={"x": torch.zeros(1, 6)},
        targets={"y": torch.zeros(1, 2)},
    )
    modes = {path: module.training for path, module in source.module.model.named_modules()}
    assert modes["head"]
    assert not modes["backbone"]
    assert not modes["backbone.dropout"]


def frozen_backbone():
    model = Net()
    model.backbone.eval().requires_grad_(False)
    return model


def test_layers_before_a_frozen_encoder_in_eval_mode_train(tmp_path):
    """PyTorch's own encoder layer has a fused path for eval mode, which has no gradient."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.inlet, self.outlet = nn.Linear(6, 8), nn.Linear(8, 2)
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x):
            return self.outlet(self.encoder(self.inlet(x)[:, None])[:, 0])

    module, reference = built(Encoder), built(Encoder)
    for model in (module, reference):
        model.encoder.eval().requires_grad_(False)
    assert_trained_like(module, reference, tmp_path)


def test_batch_norm_in_train_mode_is_refused_with_valid_advice(tmp_path):
    module = built(Net)
    with pytest.raises(CompileError, match=r"backbone\.norm\.\w+.*call \.eval\(\) on that module"):
        trainer_of(module, tmp_path / "a")
    module.backbone.norm.eval()
    trainer_of(module, tmp_path / "b")[0].close()


def test_the_mode_decides_the_best_checkpoint_and_early_stop(tmp_path):
    """Without dropout: only a branch on the mode makes evaluation differ from training."""

    class Noisy(nn.Module):
        """In train mode the weight's gradient leads away from what eval mode measures."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 2)

        def forward(self, x):
            return self.linear(x) + (10.0 if self.training else 0.0)

    module, reference = built(Noisy), built(Noisy)
    trainer, events = trainer_of(
        module,
        tmp_path,
        evaluation={"every": 1, "early_stop_patience": 2},
        optimizer={"learning_rate": 0.05},
        run={"dir": str(tmp_path), "steps": STEPS},
    )
    y = torch.from_numpy(rows(1)["y"])
    with torch.no_grad():
        expected = float(loss(reference.eval()(torch.from_numpy(rows(1)["x"])), y))
    assert trainer.evaluate(batches=8)["loss"] == pytest.approx(expected, rel=1e-5)  # not 100 more
    trainer.train()
    found = [event for event in events if isinstance(event, Evaluated)]
    # The bias falls to make up for the 10 of train mode, so that eval mode only gets worse.
    assert [event.best for event in found] == [True, False, False]
    assert trainer.step == 3


def test_model_without_mode_branch_is_evaluated_by_the_training_program(tmp_path):
    trainer, _ = trainer_of(built(Plain), tmp_path)
    trainer.evaluate(batches=1)
    (engine,) = trainer._evaluator._engines.values()
    assert engine.program is trainer.program


def test_a_model_that_cannot_be_evaluated_is_refused_before_the_first_step(tmp_path):
    class TwoResults(nn.Module):
        """In eval mode the loss function gets something else."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 2)

        def forward(self, x):
            found = self.linear(x)
            return found if self.training else (found, found.softmax(-1))

    trainer, _ = trainer_of(built(TwoResults), tmp_path, evaluation={"every": 100})
    with pytest.raises(CompileError, match=r"^in eval mode, with 8 rows, as held-out data is eval"):
        trainer.train()
    assert trainer.step == 0
