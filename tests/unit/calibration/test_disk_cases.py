"""The measurement of a disk: what it moves and leaves behind, and what it says of a bad one."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from penstock.calibration import disk_cases
from penstock.calibration.disk_cases import Disk, measured_disk
from penstock.errors import StorageError
from penstock.store.flash import ExtentFile

FILE = 64 << 10
SAMPLE, PIECES = 16 << 10, (4 << 10, 8 << 10)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(disk_cases, "FILE_BYTES", FILE)
    monkeypatch.setattr(disk_cases, "_SAMPLE_BYTES", SAMPLE)
    monkeypatch.setattr(disk_cases, "PIECE_BYTES", PIECES)


@pytest.fixture
def traffic(monkeypatch):
    """Every read and write, as its offset and size."""
    found: dict[str, list[tuple[int, int]]] = {"read": [], "write": [], "sync": []}
    read, write, sync = ExtentFile.read, ExtentFile.write, ExtentFile.sync

    def reading(self, offset, into):
        found["read"].append((offset, into.nbytes))
        read(self, offset, into)

    def writing(self, offset, data):
        found["write"].append((offset, data.nbytes))
        write(self, offset, data)

    def syncing(self):
        found["sync"].append((0, 0))
        sync(self)

    monkeypatch.setattr(ExtentFile, "read", reading)
    monkeypatch.setattr(ExtentFile, "write", writing)
    monkeypatch.setattr(ExtentFile, "sync", syncing)
    return found


def test_the_whole_file_is_written_before_it_is_read(tmp_path, traffic):
    with measured_disk(tmp_path):
        assert sorted(traffic["write"]) == [(at, PIECES[-1]) for at in range(0, FILE, PIECES[-1])]
        assert len(traffic["sync"]) == 1
        assert traffic["read"] == []


@pytest.mark.parametrize("number", range(5))
def test_a_sample_moves_its_bytes_in_pieces(tmp_path, traffic, number):
    with measured_disk(tmp_path) as disk:
        case = list(disk.cases())[number]
        for one in traffic.values():
            one.clear()
        prepared = case.prepare()
        prepared.run()
    assert prepared.amount == SAMPLE
    sizes = {size for way in ("read", "write") for _, size in traffic[way]}
    assert sizes == {int(prepared.size)}
    moved = {way: sum(size for _, size in traffic[way]) for way in ("read", "write")}
    work = case.quantity.work
    if work == "flash both":
        assert moved == {"read": SAMPLE // 2, "write": SAMPLE // 2}
        assert not {at for at, _ in traffic["read"]} & {at for at, _ in traffic["write"]}
    else:
        assert moved == {"read": 0, "write": 0} | {work.removeprefix("flash "): SAMPLE}
    assert len(traffic["sync"]) == (work != "flash read")


def test_at_most_512_mib_are_written(tmp_path, monkeypatch):
    monkeypatch.undo()
    written = disk_cases.FILE_BYTES
    file = SimpleNamespace(is_direct=True)
    for case in Disk(file, tmp_path).cases():
        if case.quantity.work != "flash read":
            assert case.most is not None
            share = 2 if case.quantity.work == "flash both" else 1
            warm_up = 1
            written += (warm_up + case.most) * disk_cases._SAMPLE_BYTES // share
    assert written <= 512 << 20


def test_nothing_remains_in_the_folder(tmp_path):
    with measured_disk(tmp_path) as disk:
        for case in disk.cases():
            case.prepare().run()
        assert list(tmp_path.iterdir()) == []  # not even while it is measured
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no")])
def test_nothing_remains_after_an_interruption(tmp_path, error):
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(type(error)), measured_disk(tmp_path):
        raise error
    assert list(tmp_path.iterdir()) == []
    assert {
        name for name in set(os.listdir("/proc/self/fd")) - descriptors if _is_below(name, tmp_path)
    } == set()


def _is_below(descriptor, folder):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder))
    except OSError:
        return False


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch, traffic):
    def nearly_full(_):
        return SimpleNamespace(f_bavail=3, f_frsize=4096)

    monkeypatch.setattr(disk_cases.os, "statvfs", nearly_full)
    with pytest.raises(StorageError) as refused, measured_disk(tmp_path):
        pass
    assert str(refused.value) == (
        f"{tmp_path}: expected 268,435,456 free bytes to measure this disk, got 12,288; free some "
        "space, or give a folder on another disk with --flash-dir"
    )
    assert traffic["write"] == []


def test_a_disk_that_fails_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.store.flash.medium.write_at", refuse)
    with pytest.raises(StorageError) as refused, measured_disk(tmp_path):
        pass
    assert str(refused.value) == (
        f"{tmp_path}: cannot measure this disk: No space left on device; give a folder on another "
        "disk with --flash-dir"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    with (
        pytest.raises(StorageError, match="cannot measure this disk: No such file or directory"),
        measured_disk(tmp_path / "nothing"),
    ):
        pass


def test_an_error_that_is_not_of_the_disk_is_not_said_to_be(tmp_path):
    with pytest.raises(OSError, match="Too many open files") as raised, measured_disk(tmp_path):
        raise OSError(24, "Too many open files")
    assert type(raised.value) is OSError
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_reading_thread_is_raised(tmp_path, monkeypatch):
    with measured_disk(tmp_path) as disk:
        both = list(disk.cases())[-1].prepare()

        def refuse(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("penstock.store.flash.medium.read_at", refuse)
        with pytest.raises(StorageError, match="Input/output error"):
            both.run()
