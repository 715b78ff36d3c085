"""A plan says so if it uses the rates of another disk than that of the run."""

from __future__ import annotations

from io import StringIO

import pytest
from measured_host import host
from rich.console import Console

from penstock.calibration import device_of
from penstock.config import Config
from penstock.machines import FLASH_DEVICE, MachineDescription
from penstock.prediction import Planner, as_json, page
from penstock.prediction.planned_disk import full_disk_note, other_disk_note


def measured(device: str | None) -> MachineDescription:
    sources = {} if device is None else {FLASH_DEVICE: device}
    return host().model_copy(update={"sources": sources})


def run(path) -> Config:
    flash = {} if path is None else {"store": {"flash": {"path": str(path)}}}
    return Config.from_mapping({"model": "tiny", **flash})


def test_other_disk_is_named_with_the_command_that_measures_it(tmp_path):
    path = tmp_path / "runs" / "flash"  # neither folder exists yet
    assert other_disk_note(run(path), measured("file system abcd")) == (
        f"store.flash.path: {path} is on {device_of(tmp_path)}, and the disk that was measured is "
        "file system abcd, whose rates this plan uses; measure the other with `penstock calibrate "
        f"--flash-dir {tmp_path}`"
    )


def test_relative_path_is_that_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    note = other_disk_note(run("flash"), measured("file system abcd"))
    assert f"--flash-dir {tmp_path}`" in note


@pytest.mark.parametrize("case", ["same disk", "not known", "no flash"])
def test_nothing_is_said_without_another_disk(tmp_path, case):
    device = {"same disk": device_of(tmp_path), "not known": None, "no flash": "file system abcd"}
    path = None if case == "no flash" else tmp_path / "flash"
    assert other_disk_note(run(path), measured(device[case])) is None


def test_disk_without_room_for_a_new_store_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.prediction.planned_disk.free_bytes", lambda folder: 1 << 30)
    path = tmp_path / "flash"
    assert full_disk_note(run(path), 1 << 30) is None
    assert full_disk_note(run(None), 0) is None
    assert full_disk_note(run(path), 3 << 30) == (
        f"store.flash.path: the store needs 3.00 GiB, and the disk of {path} has 1.00 GiB free: "
        "the run does not fit there; free some space, or choose a folder on a larger disk"
    )
    path.mkdir()  # such as the folder where a disk is mounted
    assert full_disk_note(run(path), 3 << 30) is not None
    (path / "extents").touch()  # its bytes are part of what is not free
    assert full_disk_note(run(path), 3 << 30) is None


@pytest.mark.parametrize("is_here", [True, False])
def test_only_a_plan_of_this_host_compares_the_disks(tmp_path, monkeypatch, is_here):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = Config.from_mapping(
        {
            "model": "tiny",
            "data": {"input": ["a.txt"], "tokenizer": "bytes"},
            "run": {"dir": str(tmp_path / "run")},
            "engine": {"device": "cpu"},
            "store": {"flash": {"path": str(tmp_path / "flash")}},
        }
    )
    notices: list[str] = []
    Planner(notices.append).plan(config, measured("file system abcd"), is_here=is_here)
    assert any("file system abcd" in text for text in notices) == is_here


@pytest.mark.parametrize("is_full", [True, False])
def test_a_full_disk_is_in_the_page_and_in_the_figures(tmp_path, monkeypatch, is_full):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if is_full:
        monkeypatch.setattr("penstock.prediction.planned_disk.free_bytes", lambda folder: 1 << 10)
    config = Config.from_mapping(
        {
            "model": "tiny",
            "data": {"input": ["a.txt"], "tokenizer": "bytes"},
            "engine": {"device": "cpu"},
            "store": {"flash": {"path": str(tmp_path / "flash")}},
        }
    )
    found = Planner().plan(config, measured(None), is_here=True)

    console = Console(file=StringIO(), width=1000)
    console.print(page(found, []))
    text = console.file.getvalue()
    note = full_disk_note(config, found.flash.flash_bytes)
    assert (note is not None) == is_full
    assert as_json(found, [])["full_disk_note"] == note
    if is_full:
        assert "It fits in memory: " in text
        assert f"It does not fit on the disk. {note}." in text
    else:
        assert "It fits: " in text
        assert "the disk" not in text
