"""A checkpoint written behind a run that goes on: killed, or starved of disk, it costs no bit."""

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest
import warm_start
from store_programs import train
from test_checkpoint_faults import (
    Disk,
    assert_at,
    fresh_store,
    leftovers,
    operations_of_a_save,
    save_steps,
    save_watched,
)

from penstock.errors import StorageError
from penstock.store import BackgroundSave, find_checkpoint


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, marks=pytest.mark.long),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)),
    ],
)
def test_kill_at_any_point_keeps_last_snapshot(tmp_path, seed):
    store = save_steps(tmp_path / "before", (1, 2, 3), seed)
    shutil.copytree(tmp_path / "before", tmp_path / "dry")
    train(store, 1, seed)
    orders = save_watched(store, tmp_path / "dry")
    for order in orders:
        shutil.copytree(tmp_path / "before", tmp_path / "killed" / order)
    script = Path(__file__).with_name("snapshot_killer.py")
    result = warm_start.run(
        [sys.executable, script, tmp_path / "killed", str(seed), *orders],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[1:3]))},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    committed = orders.index("index.after_rename:1")
    for number, order in enumerate(orders):
        checkpoints = tmp_path / "killed" / order
        store = fresh_store()
        assert assert_at(store, checkpoints, seed) == (4 if number >= committed else 3), order
        while store.step < 6:  # the replay ends where a run that was never killed does
            train(store, 1, seed)
        saving = BackgroundSave(store.snapshot(1), checkpoints, {"saved_at": 6})
        store.flush()
        saving.wait()
        assert assert_at(fresh_store(), checkpoints, seed) == 6
        assert leftovers(checkpoints) == []


@pytest.mark.parametrize(
    ("error", "first", "every"),
    [
        (errno.ENOSPC, 1, 2),
        (errno.EIO, 2, 2),
        pytest.param(errno.ENOSPC, 1, 1, marks=pytest.mark.slow),
        pytest.param(errno.EIO, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_failing_disk_is_reported_and_harms_no_checkpoint(
    tmp_path, monkeypatch, error, first, every
):
    """At every operation of a save, the two errors by turns; in the long run either at each."""
    total = operations_of_a_save(tmp_path, monkeypatch)
    save_steps(tmp_path / "before", (1, 2), seed=0)
    for number in range(first, total + 1, every):
        checkpoints = tmp_path / f"fail-{number}"
        shutil.copytree(tmp_path / "before", checkpoints)
        before = find_checkpoint(checkpoints, "latest")
        store = fresh_store()
        assert assert_at(store, checkpoints, 0) == 2
        train(store, 1, 0)
        with monkeypatch.context() as patch:
            Disk(patch, fail_at=number, error=error)
            saving = BackgroundSave(store.snapshot(1), checkpoints, {"saved_at": 3})
            train(store, 2, 0)  # a writer that has failed holds up nobody
            with pytest.raises(StorageError, match=os.strerror(error)):
                saving.wait()
        assert leftovers(checkpoints) == []
        now = find_checkpoint(checkpoints, "latest")
        assert assert_at(fresh_store(), checkpoints, 0) == (2 if now == before else 3)
        again = BackgroundSave(store.snapshot(1), checkpoints, {"saved_at": 5})
        store.flush()
        again.wait()
        assert assert_at(fresh_store(), checkpoints, 0) == 5
