"""A run goes on from where its state is, and is never begun anew because that is not there."""

import re
import shutil
from pathlib import Path

import pytest

from penstock import Trainer
from penstock.config import load_run
from penstock.errors import ConfigError, CorruptionError

ROOT = Path(__file__).parents[2]


def config(folder: Path, flash: Path | None, steps: int = 2) -> dict:
    return {
        "model": {"preset": "tiny", "n_layer": 1, "n_embd": 16, "n_head": 1, "n_positions": 16},
        "data": {"input": [str(ROOT / "LICENSE")]},
        "batch": {"size": 4},
        "optimizer": {"schedule": {"name": "constant"}},
        "engine": {"threads": 1},
        "store": {"flash": {"path": flash and str(flash)}},
        "run": {"dir": str(folder), "steps": steps},
        "evaluation": {"every": None},
    }


def trained(folder: Path, flash: Path | None) -> Path:
    trainer = Trainer(config(folder, flash))
    trainer.train()
    trainer.close()
    return folder


@pytest.fixture(scope="module")
def on_flash(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    return trained(folder, folder / "flash")


@pytest.fixture
def run(on_flash, tmp_path):
    """A run of two steps on flash, moved to where it is now."""
    return shutil.copytree(on_flash, tmp_path / "run")


def refused(wanted: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        Trainer(wanted)
    return str(caught.value)


def test_moved_run_with_moved_flash_resumes(run):
    trainer = Trainer(load_run(run, ["run.steps=3"]), must_exist=True)
    assert (trainer.resumed_from, trainer.train()["steps"]) == (2, 1)
    trainer.close()


def test_run_with_missing_flash_is_not_restarted(run):
    shutil.move(run / "flash", run.parent / "elsewhere")
    assert refused(config(run, run / "flash")) == (
        f"store.flash.path: {run}/flash holds no store, and {run} had its state there; check that "
        "its disk is mounted, or choose another run.dir to start a new run"
    )
    assert not (run / "flash").exists()
    trainer = Trainer(config(run, run.parent / "elsewhere", steps=3))  # where it was moved to
    assert trainer.resumed_from == 2
    trainer.close()


@pytest.mark.parametrize("other", ["new", None])
def test_run_on_flash_resumes_only_in_its_folder(run, other):
    path = other and run / other
    assert refused(config(run, path)) == (
        f"store.flash.path: expected {run}/flash, where {run} has its state, got {path or 'null'}; "
        "set it back, move the folder there, or choose another run.dir"
    )


def test_run_in_memory_is_not_restarted_on_flash(tmp_path):
    run = trained(tmp_path / "run", None)
    assert refused(config(run, run / "flash")) == (
        f"store.flash.path: {run} has its state in {run}/checkpoints/step-00000002 and none in "
        f"{run}/flash; remove store.flash.path to continue, or choose another run.dir"
    )


def test_store_is_not_created_if_the_disk_is_missing(tmp_path):
    disk = tmp_path / "disk"
    assert refused(config(tmp_path / "run", disk / "flash")) == (
        f"store.flash.path: {disk} does not exist; check that its disk is mounted, or create the "
        "folder"
    )
    assert not disk.exists()


@pytest.mark.parametrize("inner", [".", "store", "much/deeper"])
def test_file_in_the_store_path_is_refused(tmp_path, inner):
    (tmp_path / "flash").write_text("x")
    assert refused(config(tmp_path / "run", tmp_path / "flash" / inner)) == (
        f"store.flash.path: expected a folder, got the file {tmp_path}/flash; choose another path"
    )


def test_resume_state_of_a_wrong_type_is_refused(run):
    trainer = Trainer(config(run, run / "flash"))
    trainer.store.remember({**trainer._extra(), "micro_batch": "2"})
    trainer._runner.run()
    trainer.store.make_durable()
    trainer.close()
    with pytest.raises(CorruptionError, match=re.escape(f"{run}/flash: expected the resume state")):
        Trainer(config(run, run / "flash"))
