"""Checkpoints written behind training: the same losses, the same bytes, and no kill costs a bit."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock import Trainer
from penstock.errors import StorageError
from penstock.io import durable
from penstock.store import checkpoint_hash, find_checkpoint
from penstock.telemetry.events import Saved, StepDone

ROOT = Path(__file__).parents[2]
STEPS = 6


def settings(folder: Path, **checkpoint) -> dict:
    return {
        "model": {"preset": "tiny", "n_positions": 64},
        "data": {"input": [str(ROOT / "LICENSE")], "path": str(folder.parent / "data")},
        "batch": {"size": 4, "micro": 2},
        "optimizer": {"learning_rate": 1e-3, "schedule": {"name": "constant"}},
        "run": {"dir": str(folder), "steps": STEPS},
        "evaluation": {"every": None},
        "checkpoint": {"every": None, **checkpoint},
    }


class Record:
    def __init__(self):
        self.losses, self.saved = [], []

    def __call__(self, event):
        if isinstance(event, StepDone):
            self.losses.append(event.loss)
        elif isinstance(event, Saved):
            self.saved.append(event.step)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    record = Record()
    trainer = Trainer(settings(folder / "run"), on_event=record)
    trainer.train()
    assert record.saved == [STEPS]
    return folder, record.losses, trainer.store.content_hash()


@pytest.mark.parametrize(
    ("when", "buffer"), [({"every": 1}, "1B"), ({"every_minutes": 1e-6}, "1MiB")]
)
def test_checkpoint_time_changes_no_bit(undisturbed, when, buffer):
    base, losses, content = undisturbed
    folder, record = base / f"{next(iter(when))}-{buffer}", Record()
    trainer = Trainer(settings(folder, buffer=buffer, keep_last=9, **when), on_event=record)
    trainer.train()
    assert record.losses == losses
    assert record.saved == list(range(1, STEPS + 1))
    assert trainer.store.content_hash() == content
    latest = find_checkpoint(folder / "checkpoints", "latest")
    assert checkpoint_hash(latest) == content


def test_full_disk_ends_the_run_at_the_next_step_without_damage(undisturbed, monkeypatch):
    base, losses, content = undisturbed
    record = Record()
    trainer = Trainer(settings(base / "full", every=2), on_event=record)
    write, calls = durable.write, []

    def refuse(descriptor, data):
        calls.append(descriptor)
        if len(calls) > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write", refuse)
        with pytest.raises(StorageError, match="No space left on device"):
            trainer.train()
    assert trainer.step < STEPS
    trainer.train()  # there is room again
    assert record.losses == losses
    assert trainer.store.content_hash() == content


@pytest.mark.slow  # at every fault point, and faster: tests/faults/test_snapshot_faults.py
def test_killed_run_resumes_from_the_newest_complete_snapshot(undisturbed):
    base, losses, content = undisturbed
    folder = base / "killed"
    (base / "killed.yaml").write_text(yaml.safe_dump(settings(folder, every=1)))
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from penstock.cli.app import main; main()",
            "train",
            str(base / "killed.yaml"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PENSTOCK_FAULT": "checkpoint.before_state_sync:4",
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    record = Record()
    trainer = Trainer(settings(folder, every=1), on_event=record)
    assert trainer.step == 3
    trainer.train()
    assert record.losses == losses[3:]
    assert trainer.store.content_hash() == content
