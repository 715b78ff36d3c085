"""A store on flash against kills at every named point, and against disks that refuse."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_programs import random_weights, train, training_store
from test_flash_crashes import PROGRAM, SEED, STEPS, clean, opened, run

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


SEEDS = (7, 8, 9)
# What is reached only when a store is made.
ONCE = {point for point in POINTS if point == "flash.before_journal" or ".create." in point}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Folders of runs that were killed, one for each point and seed: at another visit each."""
    folder = tmp_path_factory.mktemp("killed")
    orders = [
        f"{seed}/{point}:{1 if point in ONCE else number}"
        for number, seed in enumerate(SEEDS, start=1)
        for point in POINTS
    ]
    child = subprocess.run(
        [sys.executable, str(KILLER), str(folder), *orders],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == orders
    return {tuple(order.split(":")[0].split("/")): folder / order for order in orders}


@pytest.fixture(scope="module")
def hashes(tmp_path_factory):
    """Per seed, the hash at the end of a run in memory that nobody killed."""
    found = {}
    for seed in SEEDS:
        store = training_store(PROGRAM, "bf16")
        store.load(random_weights(PROGRAM, seed).items())
        train(store, STEPS, seed)
        found[seed] = store.content_hash()
    return found


def go_on(folder, clean_hash, seed=SEED):
    store = opened(folder)
    try:
        run(store, seed)
        assert store.step == STEPS
        assert store.content_hash() == clean_hash
    finally:
        store.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_costs_no_bit(point, seed, killed, hashes):
    go_on(killed[str(seed), point], hashes[seed], seed)


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
