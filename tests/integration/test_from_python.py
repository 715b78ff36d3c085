"""A `Trainer` that a script makes: what it shows, what it is shown as, and what it refuses."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock import Trainer
from penstock.data import ArraySource
from penstock.errors import ConfigError
from penstock.models import ModelSource
from penstock.telemetry.events import RunStarted, StepDone


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.outer = nn.Linear(8, 1)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


def squared_error(output, target):
    return F.mse_loss(output, target)


def trainer_of_net(folder, **options):
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    rows = ArraySource({"x": x.numpy(), "target": x[:, :1].numpy()})
    return Trainer(
        {
            "batch": {"size": 8},
            "run": {"dir": str(folder), "steps": 12},
            "evaluation": {"every": 6, "batches": 1},
            "logging": {"every": 4},
        },
        model=ModelSource.from_module(
            Net(), loss=squared_error, inputs={"x": x[:1]}, targets={"target": x[:1, :1]}
        ),
        source=rows,
        held_out=rows,
        **options,
    )


def test_a_script_gets_log_lines_on_stderr_and_keeps_its_stdout(tmp_path, capsys):
    told = []
    trainer = trainer_of_net(tmp_path / "run", on_event=told.append)
    trainer.train()
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert lines[0] == "Net: 49 parameters, 196 B of weights in fp32, computed on cpu"
    assert lines[1] == (
        "12 steps of 8 rows (1 micro-batch of 8), 3.00 epochs of the training data, in "
        f"{tmp_path / 'run'}"
    )
    steps = [line for line in lines if line.startswith("step ") and "  learning rate " in line]
    assert [line.split()[1] for line in steps] == ["1/12", "4/12", "8/12", "12/12"]
    assert "  epoch 3.00  " in steps[-1]
    assert " rows/s  " in steps[-1]
    assert sum("held-out loss" in line for line in lines) >= 2
    assert "nats" not in shown.err  # a loss of the user's own
    assert re.match(r"finished: steps 12, loss [\d.]+, best held-out loss [\d.]+, time ", lines[-1])
    assert [e.step for e in told if isinstance(e, StepDone)] == list(range(1, 13))


def test_quiet_prints_nothing_but_reports_events(tmp_path, capsys):
    told = []
    trainer_of_net(tmp_path / "run", on_event=told.append, quiet=True).train()
    assert capsys.readouterr() == ("", "")
    assert sum(isinstance(event, StepDone) for event in told) == 12


def test_trainer_model_and_arrays_have_a_repr(tmp_path):
    trainer = trainer_of_net(tmp_path / "run", quiet=True)
    expected = (
        f"<Trainer of Net: 49 parameters, step {{}} of 12, in {tmp_path / 'run'}, fp32 on cpu>"
    )
    assert repr(trainer) == expected.format(0)
    trainer.train()
    assert repr(trainer) == expected.format(12)
    assert repr(trainer.model) == "<ModelSource Net: custom of x, target; 49 values>"
    assert repr(ArraySource({"x": np.zeros((3, 4, 5), np.float32)}, seed=7)) == (
        "<ArraySource: 3 rows in memory: x float32[4, 5], seed 7>"
    )


def test_a_language_model_has_nats_bits_and_epochs(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("water flows downhill; " * 400)
    told = []
    trainer = Trainer(
        {
            "model": {"preset": "tiny", "vocab_size": 257, "n_layer": 1},
            "data": {"input": [str(text)], "tokenizer": "bytes", "sequence_length": 32},
            "batch": {"size": 4},
            "run": {"dir": str(tmp_path / "run"), "steps": 3},
            "evaluation": {"every": 3, "batches": 2},
        },
        on_event=told.append,
    )
    trainer.train()
    found = trainer.evaluate(batches=2)
    # Of 8,801 tokens the last 440 are held out: 439 bytes, and the end of the document.
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2) * (440 / 439))
    (started,) = (event for event in told if isinstance(event, RunStarted))
    assert started.loss_unit == "nats per token"
    tokens = trainer._data.dataset.tokens("train")
    assert started.steps_per_epoch == ((tokens - 1) // 32) / 4
    err = capsys.readouterr().err
    assert f"held-out loss {found['loss']:.4f} nats per token, " in err
    assert f"{found['bits_per_byte']:.4f} bits per byte  perplexity " in err


FROM_MODULE = (
    "Trainer(model=...): expected a language model of transformers, or a module whose forward "
    "takes input_ids and labels and returns its loss; {takes}. Describe its inputs and its "
    "loss: model=ModelSource.from_module(model, loss=loss, inputs={inputs}, "
    'targets={{"target": target}}), with loss(output, target) and an example batch of each, '
    "and source=ArraySource(...) with arrays of the same names"
)


def test_image_model_error_recommends_from_module(tmp_path):
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(**sizes, intermediate_size=32, image_size=16, patch_size=8)
    for model, takes, inputs in (
        (
            transformers.ViTForImageClassification(config),
            "ViTForImageClassification.forward takes pixel_values, ",
            '{"pixel_values": pixel_values}',
        ),
        (Net(), "Net.forward takes x. ", '{"x": x}'),
    ):
        with pytest.raises(ConfigError) as raised:
            Trainer({"run": {"dir": str(tmp_path / "run"), "steps": 1}}, model=model)
        text = str(raised.value)
        assert takes in text
        shown = text[text.index(takes) :].partition(". Describe ")[0]
        assert text == FROM_MODULE.format(takes=shown, inputs=inputs)
    assert not Path(tmp_path / "run").exists()
