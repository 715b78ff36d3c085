"""Folders of a store: durable when they are made, and for one writer at a time."""

import errno
import os
from pathlib import Path

import pytest
from process_files import open_files
from store_programs import LAYERS, make_program, random_weights, training_store

from penstock.errors import StorageError
from penstock.io import durable
from penstock.store import FolderLock, files, save_checkpoint


@pytest.fixture
def synced(monkeypatch):
    """The folders that were synced, and whether what they were to name was there then."""
    found = []

    def noted(descriptor, real=durable.sync):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            found.append((path, {item.name for item in path.iterdir()}))
        real(descriptor)

    monkeypatch.setattr(durable, "sync", noted)
    return found


def locked(folder):
    FolderLock(folder, "wait").release()


def saved(folder):
    store = training_store(make_program(LAYERS))
    store.load(random_weights(store.program, 0).items())
    save_checkpoint(store, folder, {})


def appeared(folder):
    with files.appearing_folder(folder / "it", 0):
        pass


def test_folder_of_a_killed_export_is_removed_before_the_space_is_measured(tmp_path, monkeypatch):
    left = tmp_path / ".tmp-out"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    seen = []
    monkeypatch.setattr(files, "require_space", lambda folder, needed: seen.append(left.exists()))
    with files.appearing_folder(tmp_path / "out", 10):
        pass
    assert seen == [False]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("make", [durable.make_folder, locked, saved, appeared])
def test_created_parent_folders_are_durable(make, tmp_path, synced):
    make(tmp_path / "one" / "two" / "three")
    for folder, name in (
        (tmp_path, "one"),
        (tmp_path / "one", "two"),
        (tmp_path / "one" / "two", "three"),
    ):
        assert any(path == folder and name in names for path, names in synced), folder


def test_folder_left_by_a_killed_process_is_accepted(tmp_path, synced):
    durable.make_folder(tmp_path)
    assert [path for path, _ in synced] == [tmp_path.parent]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        durable.make_folder(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable for root")
def test_folder_below_an_unreadable_folder_is_created(tmp_path):
    (tmp_path / "shared" / "mine").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o100)
    durable.make_folder(tmp_path / "shared" / "mine")
    (tmp_path / "shared").chmod(0o700)


def test_folder_that_cannot_be_made_is_told_from_one_that_cannot_be_written():
    with pytest.raises(StorageError) as caught:
        FolderLock(Path("/proc/runs/a"), "run.dir")
    assert str(caught.value) == (
        "/proc/runs/a: this folder cannot be made: No such file or directory; choose another "
        "run.dir"
    )


def test_full_disk_refuses_a_lock_and_leaves_no_file_open(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = open_files(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match=r"No space left on device; .* free some space"):
            FolderLock(tmp_path, "wait")
    assert open_files(tmp_path) == before
    locked(tmp_path)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOENT, "No such file or directory; choose another folder; "),
        (errno.ENOSPC, "No space left on device; it needs 1,234 bytes, "),
    ],
)
def test_only_a_full_disk_is_answered_with_advice_about_space(tmp_path, number, told):
    with pytest.raises(StorageError) as caught, files.storage_errors(tmp_path / "run", 1234):
        raise OSError(number, os.strerror(number))
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/run: cannot write it: {told}")
    assert ("free some space" in text) == ("bytes are free" in text) == (number == errno.ENOSPC)
    assert text.endswith("; what was saved before is unchanged")
