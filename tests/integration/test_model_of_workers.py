"""Workers compute with the model that the trainer has read, whatever the run's folder holds."""

from __future__ import annotations

import json
import shutil

from hf_folders import model_of, save, set_config
from tiny_models import LENGTH, language_model

from penstock.data import ArraySource
from penstock.models import KEPT, keep_small_files
from penstock.telemetry import StepDone
from penstock.training.trainer import Trainer


def losses(folder, run, **changes) -> list[float]:
    config = {
        "model": {"hf": str(folder)},
        "data": {"sequence_length": LENGTH},
        "batch": {"size": 4, "micro": 2},
        "optimizer": {"learning_rate": 1e-2, "schedule": {"name": "constant"}},
        "engine": {"threads": 1, "device": "cpu", "memory": "256MiB"},
        "run": {"dir": str(run), "steps": 2},
        "evaluation": {"every": None},
        **changes,
    }
    found: list[float] = []

    def hear(event) -> None:
        if isinstance(event, StepDone):
            found.append(event.loss)

    source = ArraySource(language_model("llama").arrays(0))
    trainer = Trainer(config, source=source, on_event=hear, quiet=True)
    try:
        if trainer._manager is not None:
            trainer._manager.await_engines()  # before `train` writes the run's copy
        trainer.train()
    finally:
        trainer.close()
    return found


def test_workers_read_the_edited_folder_after_a_start_that_was_killed(tmp_path):
    folder = save(model_of("llama"), tmp_path / "llama")
    before, run = tmp_path / "before", tmp_path / "run"
    shutil.copytree(folder, before)
    run.mkdir()
    keep_small_files(folder, run / KEPT)  # the killed start wrote no checkpoint
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    set_config(folder, rope_parameters={**rope, "rope_theta": 3.0})
    expected = losses(folder, tmp_path / "alone")
    assert losses(before, tmp_path / "unedited") != expected
    workers = {"start": "local", "spare": 0, "lease": 30.0}
    assert losses(folder, run, engines=1, cluster=workers) == expected
    kept = json.loads((run / KEPT / "config.json").read_text())
    assert kept["rope_parameters"]["rope_theta"] == 3.0
