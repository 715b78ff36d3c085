"""Buffers with random values: drawn from the seed of the run, and part of its export."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from penstock.compiler import CompileOptions
from penstock.config import Config
from penstock.data import ArraySource
from penstock.distributed.run_spec import RunSpec
from penstock.distributed.worker import roles
from penstock.models import ModelSource
from penstock.models.buffers import ModelBuffers
from penstock.planning import model_sources, plan_execution
from penstock.planning.program_cache.key import Request, program_key
from penstock.training.export import export_run
from penstock.training.trainer import Trainer

SEED = 7


class Features(nn.Module):
    """A language model with random features, as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.register_buffer("freq", torch.randn(4, 8))
        self.register_buffer("shuffle", torch.randperm(8))
        self.register_buffer("scratch", torch.randn(8), persistent=False)
        self.register_buffer("same", self.freq)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(input_ids)
        hidden = hidden + torch.sin(hidden @ self.freq.T) @ self.same + self.scratch
        return self.head(hidden[..., self.shuffle])


def made() -> nn.Module:
    return Features()


def plain(seed: int = SEED) -> nn.Module:
    torch.manual_seed(seed)
    return Features().eval()


def rows(count: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(count).integers(0, 16, (count, 7))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def config(folder, steps: int = 2) -> dict:
    return {
        "model": {"factory": f"{__name__}:made", "task": "causal_lm"},
        "batch": {"size": 4, "micro": 4},
        "data": {"sequence_length": 6},
        "evaluation": {"every": None},
        "engine": {"threads": 1, "device": "cpu"},
        "optimizer": {"schedule": {"name": "constant"}},
        "run": {"dir": str(folder), "steps": steps, "seed": SEED},
    }


def trainer_of(folder, steps: int = 2) -> Trainer:
    source, held_out = ArraySource(rows(32)), ArraySource(rows(8))
    return Trainer(config(folder, steps), source=source, held_out=held_out, quiet=True)


def loss_of(model: nn.Module) -> float:
    held_out = {name: torch.from_numpy(value) for name, value in rows(8).items()}
    with torch.no_grad():
        logits = model(held_out["input_ids"])
    return float(F.cross_entropy(logits.flatten(0, 1), held_out["labels"].flatten()))


def test_new_run_begins_with_the_buffers_of_its_seed(tmp_path):
    trainer = trainer_of(tmp_path / "run")
    assert trainer.evaluate()["loss"] == pytest.approx(loss_of(plain()), rel=1e-5)
    assert trainer.evaluate()["loss"] != pytest.approx(loss_of(plain(0)), rel=1e-3)
    trainer.close()


def test_export_is_the_state_dict_of_the_plain_module(tmp_path):
    trainer = trainer_of(tmp_path / "run")
    trainer.train()
    (file,) = trainer.export(tmp_path / "out")
    expected = trainer.evaluate()["loss"]
    trainer.close()
    again = export_run(
        Config.from_mapping(config(tmp_path / "run")), tmp_path / "cli", "fp32", 1 << 20
    )
    assert again[0].read_bytes() == file.read_bytes()
    found = load_file(file)
    for name in ("freq", "shuffle", "same"):
        assert torch.equal(found[name], plain().get_buffer(name)), name
    rebuilt = plain()  # draws `scratch`, which is not persistent
    rebuilt.load_state_dict(found, strict=True)
    assert loss_of(rebuilt) == pytest.approx(expected, rel=1e-5)


def test_half_precision_export_keeps_the_types_of_buffers(tmp_path):
    trainer = trainer_of(tmp_path / "run")
    files = trainer.export(tmp_path / "out", "bf16", max_shard_bytes=200)
    trainer.close()
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 1
    assert found["freq"].dtype == torch.float32
    assert found["shuffle"].dtype == torch.int64
    assert found["head.weight"].dtype == torch.bfloat16
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"].keys() == found.keys()
    values = sum(parameter.numel() for parameter in plain().parameters())
    assert index["metadata"]["total_parameters"] == values


def test_resumed_run_keeps_its_buffers(tmp_path):
    trainer = trainer_of(tmp_path / "run", 1)
    trainer.train()
    before = trainer.evaluate()
    trainer.close()
    resumed = trainer_of(tmp_path / "run", 2)
    assert resumed.resumed_from == 1
    assert resumed.evaluate() == before
    resumed.close()


def test_run_of_an_older_release_keeps_the_buffers_of_seed_0(tmp_path, monkeypatch):
    extra, source_of = Trainer._extra, model_sources.source_of

    def of_older(trainer):
        return {k: v for k, v in extra(trainer).items() if k != "buffer_seed"}

    with monkeypatch.context() as older:
        older.setattr(Trainer, "_extra", of_older)
        older.setattr(
            model_sources, "source_of", lambda *parts: source_of(*parts).with_buffer_seed(0)
        )
        trainer = trainer_of(tmp_path / "run", 1)
        trainer.train()
        before = trainer.evaluate()
        trainer.close()
    resumed = trainer_of(tmp_path / "run", 2)
    assert torch.equal(resumed.model.buffers.values()["freq"], plain(0).freq)
    assert resumed.evaluate() == before
    resumed.train()
    resumed.close()
    assert trainer_of(tmp_path / "run", 3).model.buffer_seed == 0


def test_engine_in_another_process_has_the_buffers_of_the_run(tmp_path):
    settings = Config.from_mapping(config(tmp_path / "run"))
    source = model_sources.source_of(settings, None, False, lambda text: None)
    layout = plan_execution(settings, source, "cpu", 6)
    terms = json.loads(json.dumps(RunSpec.of(settings, layout, source).terms))
    program = roles._compile(terms, "cpu", "torch").program
    assert program.constants.keys() == layout.program.constants.keys()
    for name, value in layout.program.constants.items():
        assert torch.equal(program.constants[name], value), name
    assert any(torch.equal(value, plain().freq) for value in program.constants.values())


def test_cached_program_depends_on_the_seed_of_random_buffers_alone(monkeypatch):
    source = ModelSource.from_preset("tiny")
    assert not source.buffers.are_random
    assert ModelSource.from_factory(f"{__name__}:made", task="causal_lm").buffers.are_random

    def key(seed: int) -> str | None:
        seeded = source.with_buffer_seed(seed)
        request = Request(seeded, "train", seeded.input_specs(1, 8), CompileOptions(), True)
        return program_key(request, seeded.module)

    assert key(0) is not None
    assert key(0) == key(7)
    monkeypatch.setattr(ModelBuffers, "are_random", True)
    assert key(0) != key(7)


def test_export_of_a_transformers_model_has_the_tensors_of_save_pretrained(tmp_path):
    module = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=16))
    module.save_pretrained(tmp_path / "plain")
    trainer = Trainer(
        {**config(tmp_path / "run"), "model": None},
        model=module,
        source=ArraySource(rows(32)),
        quiet=True,
    )
    trainer.export(tmp_path / "out")
    trainer.close()
    ours, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "plain"))
    assert ours.keys() == theirs.keys()
