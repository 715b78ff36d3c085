"""A store on flash against kills at every named point, and against disks that refuse."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_flash_crashes import STEPS, clean, opened, run

from penstock import fault
from penstock.errors import StorageError
from penstock.store import files
from penstock.store.flash import medium

__all__ = ["clean"]  # the fixture

KILLER = Path(__file__).with_name("flash_killer.py")

POINTS = [
    "flash.before_journal",
    "journal.create.before_sync",
    "journal.create.before_rename",
    "journal.create.after_rename",
    "journal.create.after_sync",
    "flash.before_block",
    "flash.before_gradient",
    "flash.before_weights",
    "flash.before_sync",
    "flash.after_sync",
    "journal.before_record",
    "journal.before_record_sync",
    "journal.before_seal",
    "journal.before_seal_sync",
    "journal.after_seal_sync",
]


def test_these_are_all_the_points(tmp_path):
    seen = set()
    with fault.watching(seen.add):
        store = opened(tmp_path / "flash")
        run(store)
        store.close()
    assert seen == set(POINTS)


def killed_at(point, visit, folder):
    environment = os.environ | {fault.ENVIRONMENT_VARIABLE: f"{point}:{visit}"}
    child = subprocess.run(
        [sys.executable, str(KILLER), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode in (0, -signal.SIGKILL), child.stderr
    return child.returncode != 0


def go_on(folder, clean_hash):
    store = opened(folder)
    try:
        run(store)
        assert store.step == STEPS
        assert store.content_hash() == clean_hash
    finally:
        store.close()


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_costs_no_bit(point, clean, tmp_path):
    assert killed_at(point, 1, tmp_path / "flash")
    go_on(tmp_path / "flash", clean[0])


@pytest.mark.slow
@pytest.mark.parametrize("visit", [2, 3, 5])
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_a_later_visit_costs_no_bit(point, visit, clean, tmp_path):
    killed_at(point, visit, tmp_path / "flash")  # some are reached only once
    go_on(tmp_path / "flash", clean[0])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_the_nth_write_costs_no_bit(code, clean, tmp_path, monkeypatch):
    """For every n: the error says what to do, what was durable is, and the run goes on from it."""
    clean_hash, operations = clean
    writes = [medium.write_at, files.write]
    number = 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        count = 0

        def refusing(real):
            def write(descriptor, data, *place):
                nonlocal count
                count += 1
                if count == number:  # noqa: B023
                    raise OSError(code, os.strerror(code))
                return real(descriptor, data, *place)

            return write

        monkeypatch.setattr(medium, "write_at", refusing(writes[0]))
        monkeypatch.setattr(files, "write", refusing(writes[1]))
        store = None
        try:
            store = opened(folder)
            run(store)
            refused = False
        except StorageError as error:
            refused = os.strerror(code) in str(error)
            if not refused:
                raise
        finally:
            if store is not None:
                store.close()
        monkeypatch.undo()
        if not refused:
            break
        go_on(folder, clean_hash)
    assert number > operations.count("write")  # all of them were refused once
