"""Runs and commands whose program comes from the cache on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plain_training import Recipe, trainer_of
from tiny_models import language_model

from penstock.models import ModelSource
from penstock.planning import builders


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "programs"


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_a_run_from_a_cached_program_has_the_same_bits(precision, tmp_path, folder, monkeypatch):
    monkeypatch.setattr(builders, "compile_source", builders.compile_source.__wrapped__)
    case = language_model("gpt2", resid_pdrop=0.1)
    recipe = Recipe(seed=3, steps=3, warmup_steps=0)

    def run(name: str) -> tuple[list[float], str]:
        trainer, events = trainer_of(case, recipe, tmp_path / name, precision=precision)
        trainer.train()
        found = [event.loss for event in events], trainer.store.content_hash()
        trainer.close()
        return found

    compiled = run("compiled")
    entries = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert entries

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a program is compiled that is in the cache")

    monkeypatch.setattr(builders, "compile_module", refuse)
    assert run("read") == compiled


COMPILE = """
from penstock.config import Config
from penstock.planning import build_program
config = Config.from_mapping({"model": "tiny"})
program = build_program(config, micro_batch=1, sequence_length=None, precision="fp32")
print(program.graph_digest, [(stage.name, stage.kind.digest) for stage in program.stages])
"""


@pytest.mark.long
def test_another_process_reads_the_program(tmp_path):
    folder = tmp_path / "penstock" / "programs"
    command = [sys.executable, "-c", COMPILE]
    outputs, contents = [], []
    for seed in ("1", "2"):  # of the hashes of texts, which differ from process to process
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
        (entry,) = folder.iterdir()
        used = entry.stat().st_mtime
        os.utime(entry, (1, 1))
        contents.append(entry.read_bytes())
    assert outputs[0] == outputs[1]
    assert used > 1  # reading an entry sets the time of its last use
    assert contents[0] == contents[1]


@pytest.mark.long
def test_a_model_of_a_folder_is_cached_with_the_values_of_its_buffers(tmp_path, folder):
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **fields))
    model.save_pretrained(tmp_path / "model")
    compile_source = builders.compile_source.__wrapped__
    for _ in range(2):
        source = ModelSource.from_hf(tmp_path / "model")
        compile_source(source, micro_batch=1, length=4, precision="fp32")
        assert len(list(folder.iterdir())) == 1
