"""A save that is killed or starved of disk leaves the previous checkpoint or the new one."""

import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import warm_start
from store_programs import make_program, random_weights, train, training_store

from penstock.errors import StorageError
from penstock.io import durable, failpoints
from penstock.store import files, find_checkpoint, load_checkpoint, save_checkpoint

LAYERS = ({"a": (40, 3), "b": (7,)}, {"c": (5, 5)})  # as in checkpoint_killer.py


def fresh_store():
    return training_store(make_program(LAYERS, frozen=("b",)))


def trained(steps, seed):
    store = fresh_store()
    store.load(random_weights(store.program, seed).items())
    train(store, steps, seed)
    return store


def state_of(store):
    table = {name: store.master(name) for name in store.program.weights}
    for name in store.program.weights:
        table |= {f"{role}/{name}": t.clone() for role, t in store.state(name).items()}
    return table


@functools.cache
def expected_state(steps, seed):
    """What a run holds that was never interrupted."""
    return state_of(trained(steps, seed))


def assert_at(store, checkpoints, seed, which="latest"):
    """The checkpoint loads, and is bit-equal to a run of as many steps; returns its step."""
    extra = load_checkpoint(store, find_checkpoint(checkpoints, which))
    assert extra == {"saved_at": store.step}
    expected = expected_state(store.step, seed)
    for name, tensor in state_of(store).items():
        assert torch.equal(tensor.view(torch.int32), expected[name].view(torch.int32)), name
    return store.step


def save_steps(checkpoints, steps, seed):
    """Train and save after every one of `steps`; the first is marked as the best."""
    store = fresh_store()
    store.load(random_weights(store.program, seed).items())
    for step in steps:
        train(store, step - store.step, seed)
        save_checkpoint(store, checkpoints, {"saved_at": step}, best=step == steps[0])
    return store


def leftovers(checkpoints):
    return [path.name for path in checkpoints.rglob("*") if path.name.startswith(".tmp")]


def save_watched(store, checkpoints):
    """Save, and return every visit of a fault point on the way as `name:count`."""
    visits, counts = [], Counter()

    def note(name):
        counts[name] += 1
        visits.append(f"{name}:{counts[name]}")

    with failpoints.watching(note):
        save_checkpoint(store, checkpoints, {"saved_at": store.step})
    return visits


def kill_at_each(source, folder, orders):
    """Save the checkpoint `source` into `folder/order`, killed there, for all orders."""
    script = Path(__file__).with_name("checkpoint_killer.py")
    result = warm_start.run(
        [sys.executable, script, source, folder, *orders],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[1:3]))},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_killed_save_leaves_previous_or_new_checkpoint(tmp_path, seed):
    store = save_steps(tmp_path / "before", (1, 2, 3), seed)
    shutil.copytree(tmp_path / "before", tmp_path / "dry")
    train(store, 1, seed)
    orders = save_watched(store, tmp_path / "dry")
    # Visits of every step: files, state, both renames, the index, and letting the oldest go.
    assert {"checkpoint.before_rename:1", "index.before_rename:1", "remove.after_rename:1"} <= set(
        orders
    )
    for order in orders:
        shutil.copytree(tmp_path / "before", tmp_path / "killed" / order)
    kill_at_each(tmp_path / "dry" / "step-00000004", tmp_path / "killed", orders)
    committed = orders.index("index.after_rename:1")
    for number, order in enumerate(orders):
        checkpoints = tmp_path / "killed" / order
        store = fresh_store()
        assert assert_at(store, checkpoints, seed, "best") == 1
        step = assert_at(store, checkpoints, seed)
        assert step == (4 if number >= committed else 3), order
        # The run goes on from there, and the next save clears what the killed one has left.
        while store.step < 5:
            train(store, 1, seed)
            save_checkpoint(store, checkpoints, {"saved_at": store.step})
        assert assert_at(store, checkpoints, seed) == 5
        assert assert_at(store, checkpoints, seed, 4) == 4
        assert leftovers(checkpoints) == []
        folders = sorted(path.name for path in checkpoints.iterdir() if path.is_dir())
        assert folders == ["step-00000001", "step-00000004", "step-00000005"], order


@pytest.mark.long
def test_killed_first_save_leaves_nothing_or_whole_checkpoint(tmp_path):
    store = trained(1, 0)
    orders = save_watched(store, tmp_path / "dry")
    kill_at_each(tmp_path / "dry" / "step-00000001", tmp_path / "killed", orders)
    for number, order in enumerate(orders):
        checkpoints = tmp_path / "killed" / order
        if number > orders.index("checkpoint.before_rename:1"):
            assert assert_at(fresh_store(), checkpoints, 0) == 1
        else:
            assert find_checkpoint(checkpoints, "latest") is None
        train(store, 1, 0)
        save_checkpoint(store, checkpoints, {"saved_at": store.step})
        assert assert_at(fresh_store(), checkpoints, 0) == store.step
        assert leftovers(checkpoints) == []


def test_environment_selects_failpoint(tmp_path):
    script = (
        "from penstock.io import failpoints\n"
        "for n in range(3):\n print(n, flush=True)\n failpoints.point('x.y')"
    )
    for order, expected in (("x.y", "0\n"), ("x.y:2", "0\n1\n"), ("other", "0\n1\n2\n")):
        result = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PENSTOCK_FAULT": order},
            capture_output=True,
            text=True,
        )
        assert result.stdout == expected
        assert (result.returncode == -signal.SIGKILL) == (order != "other")


class Disk:
    """Counts writes and syncs, and lets the n-th fail."""

    def __init__(self, monkeypatch, fail_at=None, error=errno.ENOSPC, short=False):
        self.count, self.fail_at, self.error = 0, fail_at, error
        monkeypatch.setattr(durable, "write", self._wrap(os.write, short))
        monkeypatch.setattr(durable, "sync", self._wrap(os.fsync, False))

    def _wrap(self, original, short):
        def call(descriptor, *data):
            self.count += 1
            if self.count == self.fail_at:
                raise OSError(self.error, os.strerror(self.error))
            if short:
                return original(descriptor, data[0][: max(1, len(data[0]) // 2)])
            return original(descriptor, *data)

        return call


def operations_of_a_save(tmp_path, monkeypatch):
    store = save_steps(tmp_path / "counted", (1, 2), seed=0)
    train(store, 1, 0)
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        save_checkpoint(store, tmp_path / "counted", {})
    assert disk.count > 12
    return disk.count


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_failed_write_or_sync_leaves_previous_checkpoint(tmp_path, monkeypatch, error):
    total = operations_of_a_save(tmp_path, monkeypatch)
    store = save_steps(tmp_path / "before", (1, 2), seed=0)
    train(store, 1, 0)
    succeeded = 0
    for number in range(1, total + 1):
        checkpoints = tmp_path / f"fail-{number}"
        shutil.copytree(tmp_path / "before", checkpoints)
        before = find_checkpoint(checkpoints, "latest")
        with monkeypatch.context() as patch:
            Disk(patch, fail_at=number, error=error)
            patch.setattr(files, "free_bytes", lambda folder: 123_456)
            with pytest.raises(StorageError) as caught:
                save_checkpoint(store, checkpoints, {"saved_at": 3})
        assert os.strerror(error) in str(caught.value)
        assert leftovers(checkpoints) == []
        now = find_checkpoint(checkpoints, "latest")
        # From the moment the index names it, the new one counts, even if its last sync failed.
        succeeded += now != before
        assert assert_at(fresh_store(), checkpoints, 0) == (2 if now == before else 3)
        # The run itself is not harmed, and can save as soon as there is room.
        save_checkpoint(store, checkpoints, {"saved_at": 3})
        assert assert_at(fresh_store(), checkpoints, 0) == 3
    assert succeeded <= 1


def test_full_disk_reports_path_need_and_free_space(tmp_path, monkeypatch):
    store = trained(2, 0)
    sizes = sum(
        path.stat().st_size
        for path in save_checkpoint(store, tmp_path / "a", {}).folder.glob("*.safetensors")
    )
    monkeypatch.setattr(files, "free_bytes", lambda folder: 1_234)
    with pytest.raises(StorageError) as caught:
        save_checkpoint(store, tmp_path / "b", {})
    assert str(caught.value) == (
        f"{tmp_path}/b/step-00000002: cannot write it: No space left on device; it needs {sizes:,} "
        "bytes, 1,234 bytes are free; free some space or choose another folder; what was saved "
        "before is unchanged"
    )
    assert list((tmp_path / "b").iterdir()) == []


def test_short_writes_lose_nothing(tmp_path, monkeypatch):
    store = trained(2, 0)
    with monkeypatch.context() as patch:
        Disk(patch, short=True)
        save_checkpoint(store, tmp_path, {"saved_at": 2})
    assert assert_at(fresh_store(), tmp_path, 0) == 2


def test_files_are_synced_before_and_folders_after_rename(tmp_path, monkeypatch):
    """What makes a rename durable: its content before it, its folder after it."""
    log = []
    rename = os.rename

    def sync(descriptor):
        log.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        os.fsync(descriptor)

    def renamed(source, target):
        log.append(("rename", Path(target).name))
        rename(source, target)

    store = trained(1, 0)
    checkpoints = tmp_path / "checkpoints"
    monkeypatch.setattr(durable, "sync", sync)
    monkeypatch.setattr(os, "rename", renamed)
    save_checkpoint(store, checkpoints, {})
    assert log == [
        ("sync", tmp_path.parent.name),  # a killed process may have made what is there
        ("sync", tmp_path.name),  # the folder of checkpoints is new
        ("sync", "stage-00000.safetensors"),
        ("sync", "stage-00001.safetensors"),
        ("sync", "state.json"),
        ("sync", ".tmp-step-00000001"),
        ("rename", "step-00000001"),
        ("sync", "checkpoints"),
        ("sync", ".tmp-index.json"),
        ("rename", "index.json"),
        ("sync", "checkpoints"),
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_read_only_folder_is_reported(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="make the folder writable or choose another folder"):
        save_checkpoint(trained(1, 0), tmp_path / "checkpoints", {})
