"""A run says what was predicted of its steps, and never fails because that is not possible."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import penstock

from penstock import Trainer
from penstock.calibration import HostKey, keep, kept_machine, kept_runs, runs_file
from penstock.config import Config
from penstock.data import ArraySource
from penstock.machines import MachineDescription
from penstock.telemetry import Notice, RunMeasured, RunStarted
from penstock.training import predicted_steps

STEPS, LENGTH = 12, 16  # the first two steps warm up
RATES = [{"work": work, "rates": [1e10]} for work in ("product", "pointwise")]


def host(**store):
    return MachineDescription.model_validate(
        {
            "name": "host",
            "kind": "host",
            "engine": {"is_host": True, "rates": RATES},
            "store": {"memory": "24GiB", "rates": [{"work": "update", "rates": [1e10]}], **store},
        }
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """No run is kept among those of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


DISK = {"rates": [{"work": f"flash {way}", "rates": [1e9]} for way in ("read", "write")]}


def train(folder, on_notice=lambda text: None, **more):
    """Train a tiny model; return its events, and what it said at its end."""
    tokens = np.random.default_rng(0).integers(0, 64, (4 * STEPS, LENGTH + 1))
    events = []
    trainer = Trainer(
        {
            "model": {"preset": "tiny", "n_positions": 32, "vocab_size": 64},
            "data": {"sequence_length": LENGTH},
            "batch": {"size": 4},
            "evaluation": {"every": None},
            "run": {"dir": str(folder / "run"), "steps": STEPS},
            **more,
        },
        source=ArraySource({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}),
        on_event=events.append,
        quiet=True,
    )
    trainer.train()
    trainer.close()
    started = next(event for event in events if isinstance(event, RunStarted))
    measured = next(event for event in events if isinstance(event, RunMeasured))
    for event in events:
        if isinstance(event, Notice):
            on_notice(event.text)
    return started, measured


def flash(folder):
    return {"store": {"flash": {"path": str(folder / "flash")}, "dram": "64MiB"}}


def test_run_on_a_measured_host_compares_its_steps_with_the_prediction(tmp_path, monkeypatch):
    monkeypatch.setattr(predicted_steps, "kept_machine", lambda key: host())
    started, measured = train(tmp_path)
    assert measured.predicted == started.predicted
    assert started.predicted.streamed_bytes == measured.streamed_bytes / STEPS
    assert started.predicted.gradient_bytes == measured.gradient_bytes / STEPS
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    [report] = [row for row in map(json.loads, metrics) if row["event"] == "report"]
    assert report["predicted"] == vars(started.predicted)
    shown = penstock("inspect", tmp_path / "run")
    assert "prediction   a step was predicted to take" in shown.stdout


@pytest.mark.long
@pytest.mark.parametrize("store", [{}, {"flash": DISK}], ids=["no disk", "disk"])
def test_run_on_flash_starts_whether_or_not_the_disk_was_measured(tmp_path, monkeypatch, store):
    monkeypatch.setattr(predicted_steps, "kept_machine", lambda key: host(**store))
    started, measured = train(tmp_path, **flash(tmp_path))
    assert measured.steps == STEPS
    assert (started.predicted is None) == (not store)


def test_run_on_a_host_that_was_not_measured_has_no_prediction(tmp_path, monkeypatch):
    monkeypatch.setattr(predicted_steps, "kept_machine", lambda key: None)
    started, measured = train(tmp_path)
    assert started.predicted is None
    assert measured.predicted is None


def test_measured_run_is_kept_and_gives_the_accuracy_of_predictions(tmp_path):
    key = HostKey.here()
    keep(host(), key)
    assert kept_machine(key).accuracy is None
    _, measured = train(tmp_path)
    [run] = kept_runs(key)
    assert run.predicted_seconds == measured.predicted.seconds
    assert run.seconds == measured.usual_step_seconds > 0
    assert run.peak_bytes == measured.peak_rss_bytes > 0
    assert run.predicted_bytes == measured.predicted.peak_memory_bytes > 0
    line = runs_file(key).read_text()
    runs_file(key).write_text(line * 10)
    accuracy = kept_machine(key).accuracy
    assert accuracy.runs == 10
    assert accuracy.low == accuracy.high == pytest.approx(run.ratio, abs=0.001)


def test_run_that_is_too_short_is_not_kept(tmp_path):
    key = HostKey.here()
    keep(host(), key)
    _, measured = train(tmp_path, run={"dir": str(tmp_path / "run"), "steps": STEPS - 1})
    assert measured.predicted is not None
    assert kept_runs(key) == []


def test_runs_that_cannot_be_kept_are_a_notice_and_no_error(tmp_path):
    key = HostKey.here()
    keep(host(), key)
    runs_file(key).mkdir()
    notices = []
    _, measured = train(tmp_path, on_notice=notices.append)
    assert measured.steps == STEPS
    assert any("was not recorded" in notice for notice in notices)


@pytest.mark.parametrize("cycles", ["closed_form", "simulated"])
def test_time_of_a_simulated_mesh_is_not_predicted(monkeypatch, cycles):
    monkeypatch.setattr(predicted_steps, "kept_machine", lambda key: host())
    monkeypatch.setattr(predicted_steps, "predict", lambda *given: "a prediction")
    monkeypatch.setattr(predicted_steps, "predicted_step", lambda prediction: prediction)
    options = SimpleNamespace(cycles=cycles)
    plan = SimpleNamespace(wafer=SimpleNamespace(options=options))
    found = predicted_steps.predicted_here(Config(), SimpleNamespace(device="wafer", plan=plan))
    assert found == (None if cycles == "simulated" else "a prediction")
