"""Commands of a run that fine-tunes a Hugging Face folder, in processes that recall its model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from hf_folders import save

TEXT = "the water turns the wheel, the weights turn the loss, and the stream goes on\n" * 100
HEAVY = {
    "penstock.models.recording",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "transformers",
}
COMMAND = """
import json, sys
from penstock.cli import main
said = sys.argv.pop(1)
try:
    main()
finally:
    with open(said, "w") as file:
        json.dump(sorted(name for name in sys.modules if name.count(".") < 3), file)
"""

Command = Callable[..., tuple[str, set[str]]]


@pytest.fixture
def command(tmp_path) -> Command:
    """Return the function that runs a command in a process of its own, with the cache of this test;
    it returns the output, and which of the heavy modules were imported."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 257}
    config = AutoConfig.for_model("llama", **sizes, **heads, max_position_embeddings=32)
    torch.manual_seed(4)
    save(AutoModelForCausalLM.from_config(config).to(torch.bfloat16), tmp_path / "hf")
    (tmp_path / "text.txt").write_text(TEXT)
    settings = {
        "model": {"hf": "hf"},
        "data": {"input": ["text.txt"], "tokenizer": "bytes", "sequence_length": 16},
        "batch": {"size": 4},
        "freeze": ["model.embed_tokens.weight"],
        "optimizer": {"schedule": {"name": "constant"}},
        "checkpoint": {"every": 2},
    }
    (tmp_path / "tune.yaml").write_text(yaml.safe_dump(settings))

    def run(*arguments: str) -> tuple[str, set[str]]:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, str(tmp_path / "imported"), *arguments],
            cwd=tmp_path,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        imported = {*json.loads((tmp_path / "imported").read_text())}
        return done.stdout, HEAVY & imported

    return run


def train(command: Command, run: str, steps: int) -> set[str]:
    """Train a run; return the heavy modules that were imported."""
    return command("train", "tune.yaml", f"run.dir={run}", f"run.steps={steps}")[1]


def state_of(run: Path) -> dict[str, bytes]:
    """Return the files of the checkpoint of step 4 that hold tensors."""
    files = sorted((run / "checkpoints" / "step-00000004").rglob("*.safetensors"))
    assert files
    return {path.name: path.read_bytes() for path in files}


def losses_of(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


def test_second_start_and_resume_import_no_transformers_and_have_the_same_bits(command, tmp_path):
    assert train(command, "recorded", 4) == HEAVY
    assert train(command, "recalled", 2) == set()
    assert train(command, "recalled", 4) == set()
    assert len(losses_of(tmp_path / "recorded")) == 4
    assert losses_of(tmp_path / "recalled") == losses_of(tmp_path / "recorded")
    assert state_of(tmp_path / "recalled") == state_of(tmp_path / "recorded")


@pytest.mark.long
def test_commands_that_read_a_run_import_no_transformers_the_second_time(command):
    train(command, "run", 4)
    for name, *options in (
        ("eval", "--batches", "1"),
        ("generate", "--prompt", "the", "--max-new-tokens", "3"),
    ):
        first, _ = command(name, "run", *options)
        second, imported = command(name, "run", *options)
        assert first == second
        assert imported == set()
