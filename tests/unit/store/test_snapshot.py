"""A step's state, saved while later steps are made: the bytes of one that was saved at rest."""

import threading
import time

import pytest
import torch
from store_programs import LAYERS, make_program, random_weights, train, training_store
from waiting import SECONDS, wait_until

from penstock.errors import StorageError
from penstock.io import durable
from penstock.store import (
    AdamW,
    BackgroundSave,
    Lion,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

PLENTY = 1 << 30


def loaded(precision="fp32", seed=0, optimizer=None):
    stream = torch.bfloat16 if precision == "bf16" else torch.float32
    program = make_program(LAYERS, frozen=("position",), stream_dtype=stream)
    store = training_store(program, precision, optimizer=optimizer)
    store.load(random_weights(store.program, seed).items())
    return store


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Gate:
    """A disk on which the n-th write and those after it wait until they are let through."""

    def __init__(self, monkeypatch, at):
        self.count, self.at = 0, at
        self.reached, self.opened = threading.Event(), threading.Event()
        original = durable.write

        def write(descriptor, data):
            self.count += 1
            if self.count >= self.at:
                self.reached.set()
                assert self.opened.wait(SECONDS)
            return original(descriptor, data)

        monkeypatch.setattr(durable, "write", write)


@pytest.mark.parametrize(
    ("precision", "optimizer"), [("fp32", Lion(0.9, 0.99)), ("bf16", AdamW(0.9, 0.95, 1e-8))]
)
def test_snapshot_equals_checkpoint_of_an_idle_store(tmp_path, monkeypatch, precision, optimizer):
    """The writer is held at one write after another, and two steps go by meanwhile."""
    resting = loaded(precision, optimizer=optimizer)
    train(resting, 2, seed=0)
    expected = contents(save_checkpoint(resting, tmp_path / "rest", {"x": 1}).folder)
    train(resting, 3, seed=0)
    for number in (1, 2, 5, 9, 14):
        store = loaded(precision, optimizer=optimizer)
        train(store, 2, seed=0)
        with monkeypatch.context() as patch:
            gate = Gate(patch, number)
            saving = BackgroundSave(store.snapshot(PLENTY), tmp_path / str(number), {"x": 1})
            train(store, 1, seed=0)  # makes the updates that the writer awaits
            assert gate.reached.wait(SECONDS)
            opener = threading.Timer(0.02, gate.opened.set)
            opener.start()
            train(store, 2, seed=0)
            assert contents(saving.wait().folder) == expected, number
            opener.join()
        assert store.content_hash() == resting.content_hash()


def test_copies_stay_within_their_budget_and_training_waits(tmp_path, monkeypatch):
    store = loaded()
    train(store, 1, seed=0)
    gate = Gate(monkeypatch, 1)
    snapshot = store.snapshot(20_000)  # of 77 kB
    saving = BackgroundSave(snapshot, tmp_path, {})
    train(store, 1, seed=0)
    assert gate.reached.wait(SECONDS)
    trained = threading.Thread(target=store.flush)
    trained.start()
    wait_until(lambda: snapshot.copied_bytes)
    trained.join(0.3)
    assert trained.is_alive(), "the update must wait for the writer"
    assert 0 < snapshot.copied_bytes <= 20_000
    gate.opened.set()
    trained.join(SECONDS)
    assert not trained.is_alive()
    saving.wait()
    assert snapshot.peak_copied_bytes <= 20_000
    assert snapshot.copied_bytes == 0
    assert store.take_traffic().snapshot_seconds > 0.02
    fresh = loaded(seed=1)
    load_checkpoint(fresh, find_checkpoint(tmp_path, "latest"))
    same = loaded()
    train(same, 1, seed=0)
    assert fresh.content_hash() == same.content_hash()


def test_without_a_copy_training_only_waits(tmp_path):
    """A budget too small for any weight is none: the order of writer and updates is enough."""
    store, same = loaded(), loaded()
    for step in range(1, 6):
        train(store, 1, seed=0)
        train(same, 1, seed=0)
        snapshot = store.snapshot(1)
        saving = BackgroundSave(snapshot, tmp_path, {}, keep_last=9)
        train(store, 1, seed=0)
        train(same, 1, seed=0)
        store.flush()
        assert saving.wait().step == 2 * step - 1
        assert snapshot.peak_copied_bytes == 0
    assert store.content_hash() == same.content_hash()


def test_abandoned_snapshot_leaves_nothing_and_training_continues(tmp_path, monkeypatch):
    store = loaded()
    train(store, 1, seed=0)
    gate = Gate(monkeypatch, 2)
    saving = BackgroundSave(store.snapshot(1), tmp_path, {})
    train(store, 1, seed=0)
    assert gate.reached.wait(SECONDS)
    threading.Timer(0.1, gate.opened.set).start()
    saving.abandon()
    with pytest.raises(StorageError, match="snapshot of step 1 was abandoned"):
        saving.wait()
    store.flush()
    assert list(tmp_path.iterdir()) == []
    assert BackgroundSave(store.snapshot(1), tmp_path, {}).wait().step == 2


def test_only_one_snapshot_at_a_time(tmp_path):
    store = loaded()
    first = store.snapshot(PLENTY)
    with pytest.raises(RuntimeError, match="snapshot of step 0 is not closed yet"):
        store.snapshot(PLENTY)
    first.close()
    store.snapshot(PLENTY).close()


def test_flush_completes_without_fetch(tmp_path):
    store = loaded()
    train(store, 1, seed=0)
    saving = BackgroundSave(store.snapshot(PLENTY), tmp_path, {})
    time.sleep(0.1)
    assert not saving.is_done, "it awaits the updates of its step"
    store.flush()
    assert saving.wait().step == 1
