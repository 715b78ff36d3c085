"""A store on flash against kills at every named point, and against disks that refuse."""

import errno
import functools
import os
import sys
from pathlib import Path

import pytest
import warm_start
from test_flash_crashes import MASKS, SEED, STEPS, clean_hash, opened, operations, run

from penstock.errors import StorageError
from penstock.io import durable, failpoints
from penstock.store.flash import medium

__all__ = ["operations"]  # the fixture

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
    "flash.before_mask",
    "flash.before_sync",
    "flash.after_sync",
    "journal.before_record",
    "journal.before_record_sync",
    "journal.before_seal",
    "journal.before_seal_sync",
    "journal.after_seal_sync",
]


OF_MASKS = "flash.before_mask"


@pytest.mark.parametrize("kind", ["fp32", "sparse"])
def test_list_of_failpoints_is_complete(tmp_path, kind):
    seen = set()
    with failpoints.watching(seen.add):
        store = opened(tmp_path / "flash", kind)
        run(store)
        store.close()
    assert seen == set(points_of(kind))


def points_of(kind):
    return [point for point in POINTS if kind in MASKS or point != OF_MASKS]


# What is reached only when a store is made.
ONCE = {point for point in POINTS if point == "flash.before_journal" or ".create." in point}
# Kinds and seeds, by what is killed together; at which visit follows from the seed.
BRIEFLY = [("sparse-8bit", 8)]
FOR_LONG = [
    ("fp32", 8),
    ("8bit", 7),
    ("fp32", 7),
    ("fp32", 9),
    ("8bit", 8),
    ("8bit", 9),
    ("sparse", 8),
    ("sparse", 9),
    ("sparse-8bit", 7),
    ("sparse-8bit", 9),
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return the folder of a run that was killed, by moments, seed and point."""

    @functools.cache
    def kill_together(long):
        folder = tmp_path_factory.mktemp("killed")
        orders = [
            f"{moments}/{seed}/{point}:{1 if point in ONCE else seed - 6}"
            for moments, seed in (FOR_LONG if long else BRIEFLY)
            for point in points_of(moments)
        ]
        child = warm_start.run(
            [sys.executable, str(KILLER), str(folder), *orders],
            capture_output=True,
            text=True,
            check=False,
        )
        assert child.returncode == 0, child.stderr
        assert child.stdout.split() == orders
        return {tuple(order.split(":")[0].split("/")): folder / order for order in orders}

    def found(moments, seed, point):
        return kill_together((moments, seed) in FOR_LONG)[moments, str(seed), point]

    return found


def go_on(folder, moments="fp32", seed=SEED):
    store = opened(folder, moments)
    try:
        run(store, seed)
        assert store.step == STEPS
        assert store.content_hash() == clean_hash(moments, seed)
    finally:
        store.close()


def kills(kinds, marks=()):
    return [
        pytest.param(point, kind, seed, marks=marks)
        for kind, seed in kinds
        for point in points_of(kind)
    ]


@pytest.mark.parametrize(
    ("point", "moments", "seed"), [*kills(BRIEFLY), *kills(FOR_LONG, pytest.mark.slow)]
)
def test_kill_at_any_failpoint_does_not_change_bits(point, moments, seed, killed):
    go_on(killed(moments, seed, point), moments, seed)


class RefusingDisk:
    """Refuses the n-th write with an error, and no other."""

    def __init__(self, patch, number, code):
        self._left, self._code = number, code
        for module, name in ((medium, "write_at"), (durable, "write")):
            patch.setattr(module, name, self._refusing(getattr(module, name)))

    def _refusing(self, real):
        def write(*arguments):
            self._left -= 1
            if self._left == 0:
                raise OSError(self._code, os.strerror(self._code))
            return real(*arguments)

        return write


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "moments", "first", "every"),
    [
        pytest.param(errno.ENOSPC, "fp32", 1, 10, marks=pytest.mark.long),
        pytest.param(errno.EIO, "fp32", 6, 10, marks=pytest.mark.long),
        (errno.ENOSPC, "8bit", 3, 20),
        (errno.EIO, "sparse-8bit", 4, 20),
        *(
            pytest.param(code, moments, 1, 1, marks=pytest.mark.slow)
            for code in (errno.ENOSPC, errno.EIO)
            for moments in ("fp32", "8bit")
        ),
    ],
)
def test_refused_nth_write_does_not_change_bits(
    code, moments, first, every, operations, tmp_path, monkeypatch
):
    """The error says what to do, what was durable is, and the run goes on from it."""
    number, refused = first - every, True
    while refused:
        number += every
        folder = tmp_path / str(number)
        store = None
        with monkeypatch.context() as patch:
            RefusingDisk(patch, number, code)
            try:
                store = opened(folder, moments)
                run(store)
                refused = False
            except StorageError as error:
                if os.strerror(code) not in str(error):
                    raise
            finally:
                if store is not None:
                    store.close()
        if refused:
            go_on(folder, moments)
    writes = sum(operations(moments, "off").count(name) for name in ("write", "pwrite"))
    assert writes - every < number <= writes + every  # up to the last of them
