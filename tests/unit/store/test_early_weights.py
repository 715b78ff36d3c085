"""Weights that are streamed before their update have the bits of the update, which comes later."""

import threading

import numpy as np
import pytest
import torch
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

from penstock.errors import StorageError
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
    assert both[0].allow_early()
    return both


def all_state(store):
    return {
        (name, role): store.read(name, role, 0, int(np.prod(stored.shape)))
        for name in store.program.weights
        for role, stored in store.roles(name).items()
    }


def assert_equal(one, other):
    assert one.content_hash() == other.content_hash()
    theirs = all_state(other)
    for key, mine in all_state(one).items():
        np.testing.assert_array_equal(mine, theirs[key], err_msg=str(key))


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


def test_memory_is_that_of_streamed_values():
    for precision, width in (("fp32", 4), ("bf16", 2)):
        early, plain = stores(precision)
        account = early_weights_bytes(early.program, AdamW())
        assert account == width * early.early_elements
        more = sum(early.memory_bytes.values()) - sum(plain.memory_bytes.values())
        assert account <= more <= account + 64 * len(early.program.weights)


@pytest.mark.parametrize(
    "optimizer", [None, SGD(), AdamW(moments="8bit"), SGD(momentum=0.9, moments="8bit")]
)
def test_nothing_is_early_where_it_would_gain_little(optimizer):
    program = make_program(LAYERS)
    if optimizer is None:
        program = make_program(LAYERS, frozen=tuple(make_program(LAYERS).weights))
    store = training_store(program, optimizer=optimizer or SGD())
    assert not store.allow_early()
    store.defer(10**9)
    assert store.early_elements == 0
    assert early_weights_bytes(program, optimizer or SGD()) == 0
