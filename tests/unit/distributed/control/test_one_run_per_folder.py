"""A run with processes has its folder for itself, from before the first of them to its end."""

from __future__ import annotations

import threading

import pytest

from penstock.distributed.control import cluster_manager
from penstock.errors import ConfigError, StorageError
from penstock.planning.execution_plan import plan_execution
from penstock.training import run_assembly
from penstock.training.trainer import Trainer


@pytest.fixture
def settings(tmp_path, monkeypatch) -> dict:
    made: list = []

    def lay_out_once(*arguments: object, **named: object) -> object:
        made.append(made[0] if made else plan_execution(*arguments, **named))
        return made[0]

    monkeypatch.setattr(run_assembly, "plan_execution", lay_out_once)
    text = tmp_path / "text.txt"
    text.write_text("water " * 400)
    overrides = {"n_layer": 1, "n_embd": 16, "n_head": 1, "vocab_size": 260, "n_positions": 16}
    return {
        "model": {"preset": "gpt2", "overrides": overrides},
        "data": {"input": [str(text)], "path": str(tmp_path / "data")},
        "batch": {"size": 2, "micro": 1},
        "engine": {"threads": 1, "device": "cpu"},
        "run": {"dir": str(tmp_path / "run"), "steps": 1},
        "cluster": {"start": "listen"},
    }


def test_second_run_in_folder_is_refused_before_rendezvous_file(settings, tmp_path, monkeypatch):
    record = tmp_path / "run" / "cluster.json"
    first = Trainer(settings)
    try:
        written = record.read_bytes()
        with pytest.raises(StorageError, match=r"run is in use by process .*; wait until"):
            Trainer(settings)
        with pytest.raises(StorageError, match="run is in use by process"):
            Trainer(settings, cluster="none").train()
        assert record.read_bytes() == written
    finally:
        first.close()
    assert not record.exists()

    # What cannot be opened or made leaves neither lock nor record nor threads.
    def refuse(*arguments: object, **named: object) -> None:
        raise ConfigError("it cannot be made")

    for name in ("ClusterManager", "LocalShardExecutor"):
        with monkeypatch.context() as patch:
            patch.setattr(cluster_manager, name, refuse)
            with pytest.raises(Exception, match="it cannot be made"):
                Trainer(settings)
        assert not record.exists()
        assert not [t for t in threading.enumerate() if t.name.startswith("penstock node")]
    Trainer(settings).close()
