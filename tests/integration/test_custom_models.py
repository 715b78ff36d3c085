"""Models that are no language models: what their evaluation counts, and how their loss is taken."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.data import ArraySource
from penstock.errors import DataError
from penstock.models import InputSpec, ModelSource
from penstock.telemetry.events import Evaluated, Notice
from penstock.training.trainer import Trainer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def loss(output, y):
    return F.mse_loss(output, y)


def rows(count, seed=0):
    x = np.random.default_rng(seed).standard_normal((count, 6)).astype(np.float32)
    return {"x": x, "y": np.stack([np.sin(x).sum(1), x.prod(1)], axis=1)}


def trainer_of(folder, held_out, *, told=None, **changes):
    torch.manual_seed(0)
    module = Net()
    config = {
        "batch": {"size": 8, "micro": 8},
        "evaluation": {"every": 2},
        "engine": {"threads": 1},
        "run": {"dir": str(folder), "steps": 4},
        **changes,
    }
    trainer = Trainer(
        config,
        model=ModelSource.from_module(
            module, loss=loss, inputs={"x": InputSpec((6,))}, targets={"y": InputSpec((2,))}
        ),
        source=ArraySource(rows(2048)),
        held_out=ArraySource(held_out) if isinstance(held_out, dict) else held_out,
        on_event=(lambda event: None) if told is None else told.append,
    )
    return trainer, module


@pytest.mark.parametrize("count", [1, 5, 8, 21])
def test_every_held_out_row_counts_for_any_micro_batch(count, tmp_path):
    held_out = rows(count, seed=1)
    trainer, module = trainer_of(tmp_path, held_out)
    with torch.no_grad():
        expected = float(
            loss(module(torch.from_numpy(held_out["x"])), torch.from_numpy(held_out["y"]))
        )
    found = trainer.evaluate(batches=100)
    assert found == {"loss": pytest.approx(expected, rel=1e-5), "rows": count}


def test_empty_held_out_data_is_refused_before_the_first_step(tmp_path):
    class Empty(ArraySource):
        def evaluation_batches(self, batch_size, rows):
            return iter(())

    trainer, _ = trainer_of(tmp_path, Empty(rows(8)))
    with pytest.raises(DataError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "the held-out data has no rows: give some, or set evaluation.every to null"
    )
    assert trainer.step == 0
    with pytest.raises(DataError, match="the held-out data has no rows: there is nothing to eval"):
        trainer.evaluate()


def test_held_out_batches_without_fields_count_for_nothing(tmp_path):
    class WithEmpty(ArraySource):
        def evaluation_batches(self, batch_size, rows):
            yield from super().evaluation_batches(batch_size, rows)
            yield {}

    plain, _ = trainer_of(tmp_path / "plain", ArraySource(rows(8)))
    trainer, _ = trainer_of(tmp_path / "run", WithEmpty(rows(8)))
    assert trainer.evaluate() == plain.evaluate()


def test_weights_that_are_not_registered_are_named_at_the_start(tmp_path):
    told = []
    trainer, module = trainer_of(tmp_path, rows(16, seed=1), told=told)
    module.scales = [nn.Parameter(torch.ones(2))]
    trainer.train()
    texts = [event.text for event in told if isinstance(event, Notice)]
    assert texts == [
        "scales[0]: not trained, although a gradient is required: what a module keeps in buffers, "
        "plain tensors, lists or mappings is none of its parameters. To train it, assign an "
        "nn.Parameter or a module as an attribute, or use nn.ParameterList or nn.ModuleList; to "
        "keep it as it is, call .requires_grad_(False)"
    ]


def test_regression_has_no_perplexity(tmp_path):
    told = []
    trainer, _ = trainer_of(tmp_path, rows(16, seed=1), told=told)
    trainer.train()
    found = [event for event in told if isinstance(event, Evaluated)]
    assert [event.perplexity for event in found] == [None, None]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["event"] == "evaluation"]
    assert [line["perplexity"] for line in evaluations] == [None, None]


MODEL = """
import torch
from torch import nn


class Distance(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 1)

    def forward(self, input_ids, labels):
        guess = self.head(self.embed(input_ids))[..., 0]
        return (guess - labels.clamp(min=0) / 256).square().mean()
"""


def test_the_command_line_shows_rows_and_no_perplexity(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "distance_model.py").write_text(MODEL)
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} of a text" for i in range(2000)))
    (tmp_path / "train.yaml").write_text(
        "model: {factory: 'distance_model:Distance', task: custom}\n"
        "data: {input: [text.txt], tokenizer: bytes, sequence_length: 16, validation: 0.1}\n"
        "batch: {size: 8, micro: 8}\n"
        "evaluation: {every: 2, batches: 2}\n"
        "run: {dir: run, steps: 2}\n"
    )
    trained = CliRunner().invoke(app, ["train", "train.yaml"])
    assert trained.exit_code == 0, trained.output
    assert "held-out loss" in trained.output
    assert "perplexity" not in trained.output
    done = CliRunner().invoke(app, ["eval", "run"])
    assert done.exit_code == 0, done.output
    (line,) = done.output.splitlines()
    assert line.startswith("step 2  loss 0.")
    assert line.endswith("  (16 rows)")


MEAN_OF_MEANS = (
    "batch.micro: auto divides the batch of 1024 rows into 2 micro-batches of 512, and the loss is "
    "the mean of their losses. This is the loss of the whole batch only if every row has the same "
    "weight. Otherwise (a mean over the tokens that have labels, a loss over pairs of rows), set "
    "batch.micro: 1024 for one loss over the batch, or another divisor of it"
)


def test_automatic_micro_batches_of_a_mean_loss_give_one_notice(tmp_path):
    told = []
    for steps in (2, 3):
        trainer, _ = trainer_of(
            tmp_path,
            rows(8),
            told=told,
            batch={"size": 1024},
            optimizer={"schedule": {"name": "constant"}},
            run={"dir": str(tmp_path), "steps": steps},
        )
        trainer.train()
    assert trainer.step == 3
    assert [event.text for event in told if isinstance(event, Notice)] == [MEAN_OF_MEANS]


@pytest.mark.parametrize("micro", [512, 1024])
def test_configured_micro_batches_give_no_notice(micro, tmp_path):
    told = []
    trainer, _ = trainer_of(tmp_path, rows(8), told=told, batch={"size": 1024, "micro": micro})
    trainer.train()
    assert not [event for event in told if isinstance(event, Notice)]
