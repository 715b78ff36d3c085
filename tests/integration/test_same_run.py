"""A run goes on with the model that it was started with, or not at all."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.data import ArraySource
from penstock.errors import ConfigError
from penstock.models import InputSpec, ModelSource
from penstock.telemetry.events import Notice
from penstock.training.numerics import changed_numerics
from penstock.training.trainer import Trainer

ACTIVATION = "tanh"  # of the factory below; a test changes it, as a user edits a file


class Net(nn.Module):
    def __init__(self, activation=torch.tanh, width=16, dropout=0.0):
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(width, 2)
        self.activation, self.dropout = activation, nn.Dropout(dropout)

    def forward(self, x):
        return self.second(self.dropout(self.activation(self.first(x))))


class Renamed(Net):
    """The same under another name."""


def made():
    return Net(getattr(torch, ACTIVATION))


def loss(output, y):
    return F.mse_loss(output, y)


def rows():
    x = np.random.default_rng(0).standard_normal((64, 6)).astype(np.float32)
    return {"x": x, "y": np.stack([np.sin(x).sum(1), x.prod(1)], axis=1)}


def trainer_of(module, folder, *, steps=4, tier="memory", told=None, options=None, **changes):
    specs = {"inputs": {"x": InputSpec((6,))}, "targets": {"y": InputSpec((2,))}}
    config = {
        "batch": {"size": 8, "micro": 8},
        "evaluation": {"every": None},
        "engine": {"threads": 1},
        "optimizer": {"schedule": {"name": "constant"}},
        "run": {"dir": str(folder), "steps": steps},
        **changes,
    }
    if tier == "flash":
        config["store"] = {"flash": {"path": str(folder / "flash")}}
    if module is None:
        model = ModelSource.from_factory("test_same_run:made", loss="test_same_run:loss", **specs)
    else:
        model = ModelSource.from_module(module, loss=loss, **specs)
    return Trainer(
        config,
        model=model,
        source=ArraySource(rows()),
        held_out=ArraySource(rows()),
        on_event=(lambda event: told.append(event)) if told is not None else None,
        **(options or {}),
    )


def net(seed=0, kind=Net, **arguments):
    torch.manual_seed(seed)
    return kind(**arguments)


def train(*arguments, **changes):
    trainer = trainer_of(*arguments, **changes)
    try:
        return trainer.train()
    finally:
        trainer.close()


@pytest.mark.parametrize("tier", ["memory", "flash"])
def test_another_forward_with_the_same_weights_is_refused(tier, tmp_path):
    train(net(), tmp_path, tier=tier)
    for other in (net(activation=torch.relu), net(dropout=0.1)):
        with pytest.raises(ConfigError) as caught:
            trainer_of(other, tmp_path, tier=tier)
        assert str(caught.value) == (
            f"{tmp_path} was trained with another model, which computes something else than Net "
            "does now (its code, a size or a dropout differs); give the model that the run was "
            "started with, or choose another run.dir"
        )
    with pytest.raises(ConfigError, match="was trained with Net, which computes something else"):
        trainer_of(net(kind=Renamed, activation=torch.relu), tmp_path, tier=tier)


@pytest.mark.parametrize("tier", ["memory", "flash"])
def test_a_resume_tells_what_computes_it_otherwise(tier, tmp_path):
    def notices_of(steps, **changes):
        told = []
        train(net(), tmp_path, tier=tier, told=told, steps=steps, **changes)
        return [event.text for event in told if isinstance(event, Notice)]

    assert notices_of(2) == notices_of(4) == []
    assert notices_of(6, engine={"threads": 2}) == [
        "what computes this run has changed since its last step (threads 1 -> 2): later steps may "
        "differ in their last bits from those of a run without an interruption"
    ]
    assert notices_of(8, engine={"threads": 2}) == []
    (done,) = notices_of(8, engine={"threads": 1})  # no step follows
    assert "already has its 8 steps" in done


def test_changes_of_a_release_are_told_and_an_older_record_is_not_judged():
    now = {"torch": "2.13.0", "penstock": "0.2.0 (aa)"}
    assert changed_numerics(None, now) is None
    assert changed_numerics({"torch": "2.13.0", "of_another_release": "1"}, now) is None
    changed = changed_numerics({"torch": "2.12.0", "penstock": "0.1.0 (bb)"}, now)
    assert "(torch 2.12.0 -> 2.13.0, penstock 0.1.0 (bb) -> 0.2.0 (aa))" in str(changed)


@pytest.mark.parametrize("tier", ["memory", "flash"])
def test_other_initial_values_are_refused_unless_ignored(tier, tmp_path):
    train(net(seed=0), tmp_path, tier=tier)
    other = trainer_of(net(seed=1), tmp_path, tier=tier, steps=8)
    before = other.store.content_hash()
    assert other.evaluate(batches=1)["loss"] > 0  # to evaluate, the run's weights are enough
    with pytest.raises(ConfigError) as caught:
        other.train()
    assert str(caught.value) == (
        f"{tmp_path} was started from other initial values than Net has now. To continue with the "
        "weights of the run, pass Trainer(..., ignore_initial_values=True), or call "
        "torch.manual_seed before the module is built, in every run of the script; to train this "
        "module, choose another run.dir"
    )
    assert other.store.content_hash() == before
    other.close()
    options = {"ignore_initial_values": True}
    assert train(net(seed=1), tmp_path, tier=tier, steps=8, options=options)["steps"] == 4
    # What is recorded stays what the run began with.
    assert train(net(seed=0), tmp_path, tier=tier, steps=9)["steps"] == 1


@pytest.mark.parametrize("tier", ["memory", "flash"])
def test_same_script_resumes_to_the_same_bits(tier, tmp_path):
    for steps in (3, 6):
        train(net(), tmp_path / "parts", tier=tier, steps=steps)
    train(net(), tmp_path / "whole", tier=tier, steps=6)
    hashes = set()
    for name in ("parts", "whole"):
        trainer = trainer_of(net(), tmp_path / name, tier=tier, steps=6)
        hashes.add(trainer.store.content_hash())
        trainer.close()
    assert len(hashes) == 1


def test_renamed_class_resumes(tmp_path):
    train(net(), tmp_path)
    assert train(net(kind=Renamed), tmp_path, steps=6)["steps"] == 2


def test_weights_of_another_shape_are_named(tmp_path):
    train(net(), tmp_path)
    with pytest.raises(ConfigError, match=r"first\.weight"):
        trainer_of(net(width=20), tmp_path)


def test_edited_factory_is_refused(tmp_path, monkeypatch):
    train(None, tmp_path)
    assert train(None, tmp_path, steps=6)["steps"] == 2
    monkeypatch.setattr(f"{__name__}.ACTIVATION", "relu")
    with pytest.raises(ConfigError, match="computes something else than Net does now"):
        trainer_of(None, tmp_path)


def test_run_of_an_older_release_resumes(tmp_path, monkeypatch):
    from penstock.training.resume_state import ResumeState

    whole = ResumeState.to_mapping

    def older(self):
        return {k: v for k, v in whole(self).items() if k not in ("values", "architecture")}

    with monkeypatch.context() as patched:
        patched.setattr(ResumeState, "to_mapping", older)
        train(net(), tmp_path)
    told = []
    assert train(net(seed=1), tmp_path, steps=6, told=told)["steps"] == 2
    assert not [event for event in told if isinstance(event, Notice)]


def test_graph_of_another_release_gives_a_notice(tmp_path, monkeypatch):
    train(net(), tmp_path)
    monkeypatch.setattr("penstock.__version__", "99.0")
    told = []
    assert train(net(), tmp_path, steps=6, told=told)["steps"] == 2
    notice, changed = [event.text for event in told if isinstance(event, Notice)]
    assert "changed since its last step (penstock 0" in changed
    assert re.match(
        r"cannot compare Net with the model of .*: the run's model was captured with torch "
        r"[\d.]+, transformers [\d.]+\w*, penstock [\d.]+, micro-batches of 8, fp32, this one "
        r"with .* penstock 99\.0, micro-batches of 8, fp32",
        notice,
    )
    told.clear()
    assert train(net(), tmp_path, steps=7, told=told)["steps"] == 1  # now it is recorded
    assert not [event for event in told if isinstance(event, Notice)]


@pytest.mark.long
def test_a_preset_given_as_a_source_is_compared_too(tmp_path):
    tokens = np.random.default_rng(0).integers(96, size=(16, 8))
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 96, "n_positions": 8}

    def trainer_with(**fields):
        return Trainer(
            {
                "data": {"sequence_length": 8},
                "batch": {"size": 4, "micro": 4},
                "evaluation": {"every": None},
                "run": {"dir": str(tmp_path), "steps": 1},
            },
            model=ModelSource.from_preset("gpt2", {**sizes, **fields}),
            source=ArraySource({"input_ids": tokens, "labels": tokens}),
        )

    trainer_with().train()
    trainer_with().close()
    with pytest.raises(ConfigError, match="computes something else than GPT2LMHeadModel does now"):
        trainer_with(activation_function="relu")
