"""Weights that do not train are named where shards and engines are processes, too."""

from __future__ import annotations

import pytest

from penstock.telemetry.events import Notice, StepDone
from penstock.training.trainer import Trainer

MODEL = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 300, "n_positions": 16}
RANK = 128  # A is then [128, 64], two blocks, which two shards divide


@pytest.mark.parametrize(
    ("engines", "replicas", "where"),
    [
        pytest.param(1, 1, "apart", marks=pytest.mark.long),
        pytest.param(2, 2, "apart", marks=pytest.mark.slow),
        pytest.param(2, 1, "here", marks=pytest.mark.slow),
    ],
)
def test_weights_that_never_train_are_named_once(engines, replicas, where, tmp_path):
    """An adapter's A gets no gradient as long as B is zero, and B is frozen at zero."""
    (tmp_path / "text.txt").write_text("\n".join(f"line {i} of a text" for i in range(400)))
    told, steps = [], []

    def hear(event):
        if isinstance(event, Notice):
            told.append(event.text)
        elif isinstance(event, StepDone):
            steps.append(event.step)

    trainer = Trainer(
        {
            "model": {"preset": "gpt2", "overrides": MODEL},
            "data": {"input": [str(tmp_path / "text.txt")]},
            "batch": {"size": 4, "micro": 1},
            "engine": {"threads": 1, "memory": "256MiB"},
            "engines": engines,
            "train": ["*.ln_1.weight"],
            "lora": {"rank": RANK, "targets": ["*.c_proj.weight"]},
            "freeze": ["*.lora_B.weight"],
            "store": {"shards": 2, "replicas": replicas},
            "cluster": {"start": "local", "spare": 0, "lease": 30.0, "shards": where},
            "evaluation": {"every": None},
            "run": {"dir": str(tmp_path / "run"), "steps": 7},
        },
        on_event=hear,
    )
    try:
        pieces = trainer.store.shard_map.pieces["transformer.h.0.attn.c_proj.lora_A.weight"]
        trainer.train()
    finally:
        trainer.close()
    assert len(pieces) == 2
    assert steps == [*range(1, 8)]
    (notice,) = [text for text in told if "do not train" in text]
    assert notice == (
        "2 weight(s) do not train: their gradient was zero in every element in 5 steps, and only "
        "weight decay changes them: transformer.h.0.attn.c_proj.lora_A.weight, "
        "transformer.h.0.mlp.c_proj.lora_A.weight. Freeze them by name, or find out why the loss "
        "does not depend on them"
    )
