"""Weights that are streamed before their update have the bits of the update, which comes later."""

import threading

import numpy as np
import pytest
import torch
from sparse_training import (
    METHODS,
    SPARSE,
    assert_same_contents,
    contents,
    dense_gradients,
    send_dense,
    sparse_store,
    streamed,
)
from store_programs import (
    LAYERS,
    forward_sweep,
    make_program,
    random_gradients,
    random_weights,
    send,
    train,
    training_store,
)

from penstock.errors import BudgetError, StorageError
from penstock.store import SGD, AdamW, Lion, early_weights_bytes
from penstock.store.checkpoint import BackgroundSave, load_checkpoint

BY_PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZERS = [AdamW(0.9, 0.95), SGD(momentum=0.9, nesterov=True), Lion()]
EARLY = 50 * 16 + 7 * 16 + 33 * 17  # elements of the first weights, up to one of block 0


def stores(precision="fp32", **settings):
    """A store that streams early, and one that does not, with the same weights."""
    dtype = BY_PRECISION[precision]
    program = make_program(LAYERS, stream_dtype=dtype)
    both = [training_store(program, precision, gradient_dtype=dtype, **settings) for _ in range(2)]
    for store in both:
        store.load(random_weights(program, 0).items())
    both[0].allow_early()
    return both


def assert_equal(one, other):
    assert one.content_hash() == other.content_hash()
    assert_same_contents(contents(one), contents(other))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", BY_PRECISION)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_every_bit_is_that_of_updates_at_the_fetch(precision, optimizer, clip_norm):
    early, plain = stores(precision, optimizer=optimizer, clip_norm=clip_norm)
    generator = np.random.default_rng(5)
    deferred = 0
    for step in range(8):
        early.defer(int(generator.integers(0, early.early_elements + 1)))
        streamed = [forward_sweep(store) for store in (early, plain)]
        for name, view in streamed[1].items():
            assert torch.equal(streamed[0][name], view), (step, name)
        for stage in (3, 2, 1, 0):  # the backward sweep fetches them again
            for one, other in zip(early.fetch(stage), plain.fetch(stage), strict=True):
                assert torch.equal(one, other)
        gradients = random_gradients(early.program, generator)
        for store in (early, plain):
            send(store, gradients)
            assert store.commit().decision.step == step + 1
        deferred += early.take_update_times().deferred_elements
    assert deferred
    assert_equal(early, plain)


def test_updates_are_deferred_up_to_the_limit_in_the_order_of_the_fetches():
    early, _ = stores()
    early.defer(EARLY)
    train(early, 1, seed=1)
    early.take_update_times()
    forward_sweep(early)
    times = early.take_update_times()
    all_elements = early.early_elements
    assert (times.elements, times.deferred_elements) == (all_elements - EARLY, 0)
    assert times.seconds > 0
    early.make_deferred(0)  # `embed` and `position`
    assert early.take_update_times().deferred_elements == 50 * 16 + 7 * 16
    send(early, random_gradients(early.program, np.random.default_rng(0)))
    assert early.take_update_times().deferred_elements == 33 * 17


def test_reading_a_weight_makes_its_deferred_update():
    early, plain = stores()
    early.defer(early.early_elements)
    for store in (early, plain):
        train(store, 2, seed=3)
        forward_sweep(store)
    assert torch.equal(early.master("embed"), plain.master("embed"))
    assert torch.equal(early.stream(["position"])[0], plain.stream(["position"])[0])
    early.flush()
    assert_equal(early, plain)


@pytest.mark.parametrize("deferring", [EARLY, 10**9])
def test_snapshot_beside_deferred_updates_is_the_state_of_its_step(tmp_path, deferring):
    early, plain = stores("bf16")
    early.defer(deferring)
    for store in (early, plain):
        train(store, 2, seed=4)
    saving = BackgroundSave(early.snapshot(1 << 20), tmp_path, {})
    train(early, 2, seed=4)
    saving.wait()
    restored, _ = stores("bf16")
    load_checkpoint(restored, tmp_path / "step-00000002")
    assert_equal(restored, plain)


def test_restore_forgets_values_that_were_streamed_early(tmp_path):
    early, plain = stores()
    early.defer(early.early_elements)
    train(plain, 1, seed=5)
    saving = BackgroundSave(plain.snapshot(1 << 20), tmp_path, {})
    plain.flush()
    saving.wait()
    train(early, 3, seed=6)
    forward_sweep(early)
    load_checkpoint(early, tmp_path / "step-00000001")
    for name, view in forward_sweep(plain).items():
        assert torch.equal(forward_sweep(early)[name], view)
    train(early, 2, seed=7)
    train(plain, 2, seed=7)
    assert_equal(early, plain)


def test_step_that_is_discarded_keeps_its_early_weights():
    early, plain = stores()
    early.defer(early.early_elements)
    for store in (early, plain):
        train(store, 2, seed=8)
    forward_sweep(early)
    generator = np.random.default_rng(0)
    early.receive(3, random_gradients(early.program, generator)[3])  # makes the update of `embed`
    early.discard()
    for store in (early, plain):
        train(store, 2, seed=9)
    assert_equal(early, plain)


def test_deferred_updates_in_another_thread_change_no_bit():
    early, plain = stores("bf16")
    early.defer(early.early_elements)
    for _ in range(3):
        for store in (early, plain):
            forward_sweep(store)
        makers = [threading.Thread(target=early.make_deferred, args=(s,)) for s in (3, 2, 1, 0)]
        for maker in makers:
            maker.start()
        gradients = random_gradients(early.program, np.random.default_rng(early.step))
        for store in (early, plain):
            send(store, gradients)
        for maker in makers:
            maker.join()
        for store in (early, plain):
            store.commit()
    assert_equal(early, plain)


def test_interrupted_update_refuses_early_weights_too(monkeypatch):
    early, _ = stores()
    early.defer(EARLY)
    train(early, 1, seed=1)
    update = type(early._optimizer).update

    def interrupted(*arguments, **settings):
        if settings.get("streamed") is None:
            raise KeyboardInterrupt
        update(*arguments, **settings)

    monkeypatch.setattr(type(early._optimizer), "update", interrupted)
    early.fetch(0)  # two weights, both early
    with pytest.raises(KeyboardInterrupt):
        early.make_deferred(0)
    with pytest.raises(StorageError, match="the update of embed was interrupted"):
        early.fetch(1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", BY_PRECISION)
def test_changing_masks_beside_early_weights_keep_every_bit(method, precision):
    """Sparse weights are never early; steps that replace updates make them at the fetch."""
    early, plain = (sparse_store(method, precision=precision) for _ in range(2))
    early.allow_early()
    generator, deferred = np.random.default_rng(1), 0
    for _ in range(17):
        early.defer(int(generator.integers(0, early.early_elements + 1)))
        sent = [streamed(store) for store in (early, plain)]
        for name, view in sent[1].items():
            values = [v.values if name in SPARSE else v for v in (sent[0][name], view)]
            assert torch.equal(*values), (early.step, name)
        for store, views in zip((early, plain), sent, strict=True):
            send_dense(store, dense_gradients(store.program, store.step), views)
            store.commit()
        deferred += early.take_update_times().deferred_elements
    assert deferred
    assert_same_contents(contents(early), contents(plain))


def test_threads_that_fetch_at_once_make_new_values_once(monkeypatch):
    early, _ = stores()
    early.defer(early.early_elements)
    train(early, 1, seed=1)
    update, made, meeting = type(early._optimizer).update, [], threading.Barrier(2)

    def noting(self, weight, gradient, state, **settings):
        made.append(weight[0].size)
        update(self, weight, gradient, state, **settings)

    monkeypatch.setattr(type(early._optimizer), "update", noting)

    def fetch():
        meeting.wait()
        forward_sweep(early)

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(spec.elements for spec in early.program.weights.values())


def test_memory_is_that_of_streamed_values_once_they_are_asked_for():
    for precision, width in (("fp32", 4), ("bf16", 2)):
        early, plain = stores(precision)
        before = sum(early.memory_bytes.values())
        assert before == sum(plain.memory_bytes.values())
        early.defer(1)
        account = early_weights_bytes(early.program, AdamW())
        assert sum(early.memory_bytes.values()) == before + account
        least = width * early.early_elements
        assert least <= account <= least + 64 * len(early.program.weights)


@pytest.mark.parametrize("is_locked", [True, False])
def test_nothing_is_early_if_its_memory_cannot_be_page_locked(is_locked, monkeypatch):
    early, plain = stores()
    locked = []
    monkeypatch.setattr("penstock.store.masters.page_lock", lambda slab: True)
    monkeypatch.setattr(
        "penstock.store.early_weights.page_lock", lambda slab: locked.append(slab) or is_locked
    )
    assert early.page_lock()
    assert not locked  # those of the masters come first
    early.defer(10**9)
    assert locked
    assert (early.early_elements > 0) == is_locked
    assert ("early weights" in early.memory_bytes) == is_locked
    for store in (early, plain):
        train(store, 3, seed=2)
    assert (early.take_update_times().deferred_elements > 0) == is_locked
    assert_equal(early, plain)


def test_nothing_is_early_if_its_memory_cannot_be_allocated(monkeypatch):
    early, plain = stores()

    def refused(*arguments):
        raise BudgetError("no memory")

    monkeypatch.setattr("penstock.store.early_weights.allocate_role", refused)
    early.defer(10**9)
    assert early.early_elements == 0
    for store in (early, plain):
        train(store, 2, seed=2)
    assert_equal(early, plain)


@pytest.mark.parametrize(
    "optimizer", [None, SGD(), AdamW(moments="8bit"), SGD(momentum=0.9, moments="8bit")]
)
def test_nothing_is_early_where_it_would_gain_little(optimizer):
    program = make_program(LAYERS)
    if optimizer is None:
        program = make_program(LAYERS, frozen=tuple(make_program(LAYERS).weights))
    store = training_store(program, optimizer=optimizer or SGD())
    store.allow_early()
    store.defer(10**9)
    assert store.early_elements == 0
    assert early_weights_bytes(program, optimizer or SGD()) == 0
