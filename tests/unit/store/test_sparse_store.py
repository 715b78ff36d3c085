"""A store trains sparse weights as a masked dense loop does, and masks change with the commit."""

import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from grids import thinned
from sparse_training import (
    DENSITY,
    LAYERS,
    METHODS,
    OPTIMIZERS,
    SPARSE,
    MaskedLoop,
    assert_same_contents,
    contents,
    dense_gradients,
    dense_moment,
    elements_of,
    empty_store,
    rule_of,
    send_dense,
    sparse_program,
    sparse_store,
    streamed,
    train_sparse,
)
from store_programs import make_program, random_weights, train, training_store

from penstock.errors import ConfigError, NonFiniteError, StorageError
from penstock.sparsity import (
    ChangeTimes,
    GradualMagnitude,
    SparseWeight,
    SparsitySchedule,
)
from penstock.store import (
    DramStore,
    MaskRule,
    dram_store_memory,
    passing_bytes,
)

ALL_STEPS = 20
EXACT = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize(
    ("precision", "how"),
    # Every method with every optimizer, and either of them with both precisions.
    thinned(["fp32", "bf16"], [*itertools.product(METHODS, OPTIMIZERS)], others=pytest.mark.long),
)
def test_twenty_steps_agree_with_a_masked_dense_loop(precision, how):
    method, optimizer = how
    store = sparse_store(method, optimizer, precision)
    reference = MaskedLoop(store, method, optimizer)
    for _ in range(ALL_STEPS):
        gradients = dense_gradients(store.program, store.step)
        weights = streamed(store)
        for name in SPARSE:
            assert weights[name].index.same_mask(store.mask(name))
        send_dense(store, gradients, weights)
        commit = store.commit()
        assert commit.decision.norm == pytest.approx(reference.train(gradients), rel=1e-6)
        where = f"{method}, {optimizer}, {precision}, step {store.step}"
        for name in SPARSE:
            np.testing.assert_array_equal(
                store.mask(name).mask(), reference.masks[name], err_msg=f"{where}: {name}"
            )
        for name in reference.trained:
            changes = any(change.weight == name for change in commit.decision.masks)
            compare(store, reference, name, changes, where)
    assert torch.equal(store.master("position"), random_weights(store.program, 5)["position"])


def compare(store, reference, name, changes, where):
    """Compare a weight and its moments; a rounded moment is then taken from the store.

    A moment of 8 bits is rounded at the update, and again where the mask changes: its group is
    another then.
    """
    weight = store.master(name).numpy().reshape(-1)
    np.testing.assert_allclose(weight, reference.weights[name], **EXACT, err_msg=f"{where}: {name}")
    for role, exact in reference.moments[name].items():
        moment, step = dense_moment(store, name, role)
        if changes:  # the first rounding is by the scale of a group before, and of its value
            step = 2.2 * step + step.any() * np.abs(exact).max() * 2.0**-15
        error = np.abs(moment - exact) - (step + EXACT["atol"] + EXACT["rtol"] * np.abs(exact))
        assert (error <= 0).all(), f"{where}: {role} of {name}, by {error.max()}"
        if step.any():
            reference.moments[name][role] = moment


@pytest.mark.parametrize("method", ["gmp", "set", "rigl"])
def test_masks_change_at_the_steps_of_the_policy_and_by_its_numbers(method):
    store = sparse_store(method)
    versions, kept, counted = [], [], Counter()
    for commit in train_sparse(store, ALL_STEPS):
        changed = {change.weight: change for change in commit.decision.masks}
        assert commit.decision.replaces_update == (method == "rigl" and bool(changed))
        versions.append(bool(changed))
        counted.update(changed.keys())
        if method != "gmp":
            assert all(change.drop.count == change.grow.count for change in changed.values())
    changes = [7, 10, 13, 14] if method == "gmp" else [3, 7, 11, 15]
    assert [step for step, is_one in enumerate(versions, 1) if is_one] == changes
    for name, weight in streamed(store).items():
        if name in SPARSE:
            kept.append(weight.values.numel())
            assert weight.version == counted[name]
            assert store.mask_sizes[name].kept == weight.index.kept
    assert counted["block.0.weight"] == len(changes)
    assert kept[:2] == [math.floor(elements_of(n) * DENSITY[n] + 0.5) for n in SPARSE[:2]]


def test_fetch_returns_entries_and_mask_and_asks_for_dense_gradients_where_entries_grow_by_them():
    store = sparse_store("rigl", precision="bf16")
    for step in range(1, 9):
        weights = streamed(store)
        for name in SPARSE:
            weight = weights[name]
            assert isinstance(weight, SparseWeight)
            assert weight.shape == store.program.weights[name].shape
            assert weight.values.dtype == torch.bfloat16
            assert weight.values.shape == (weight.index.kept,)
            assert weight.dense_gradient == (step in (3, 7))
            master = store.master(name).reshape(-1)[torch.from_numpy(weight.index.positions())]
            assert ((weight.values.float() - master).abs() <= master.abs() * 2.0**-8).all()
        train_sparse(store, 1)
    (weight,) = store.stream(["embed"])
    assert weight.index.same_mask(store.mask("embed"))
    assert not weight.dense_gradient


@pytest.mark.parametrize("optimizer", ["adamw", "adamw 8bit", "momentum 8bit", "lion 8bit"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_full_mask_trains_to_the_bits_of_a_dense_store(optimizer, precision):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    whole = {name: elements_of(name) for name in SPARSE}
    settings = {"precision": precision, "optimizer": OPTIMIZERS[optimizer], "clip_norm": 30.0}
    rule = MaskRule(rule_of("set").policy, 1, "random", dict.fromkeys(SPARSE, 1.0))
    dense = training_store(make_program(LAYERS, stream_dtype=dtype), **settings)
    sparse = training_store(
        make_program(LAYERS, stream_dtype=dtype, sparse=whole), masks=rule, **settings
    )
    commits = []
    for store in (dense, sparse):
        store.load(random_weights(store.program, 2).items())
        commits.append(train_sparse(store, 6))
    assert commits[0] == commits[1]
    assert dense.content_hash() == sparse.content_hash()
    for name in dense.program.weights:
        assert torch.equal(dense.master(name), sparse.master(name))
        for role, array in dense.state(name).items():
            assert torch.equal(array.reshape(-1), sparse.state(name)[role].reshape(-1)), role


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [3, 4, 7])
def test_discarded_step_is_replayed_to_the_same_bits(method, at):
    plain, replayed = sparse_store(method), sparse_store(method)
    commits = train_sparse(plain, 9), train_sparse(replayed, at - 1)
    wrong = dense_gradients(plain.program, 99)
    send_dense(replayed, {stage: wrong[stage] for stage in (3, 2)})
    replayed.discard()
    assert train_sparse(replayed, 9 - replayed.step) == commits[0][at - 1 :]
    assert_same_contents(contents(plain), contents(replayed))


@pytest.mark.parametrize("place", ["kept", "absent"])
def test_dense_gradient_that_is_not_finite_commits_nothing(place):
    plain, store = sparse_store("rigl"), sparse_store("rigl")
    train_sparse(store, 2)
    broken = dense_gradients(store.program, 2)
    index = store.mask("block.0.weight")
    where = np.flatnonzero(index.mask() == (place == "kept"))[40]
    broken[1]["block.0.weight"].reshape(-1)[where] = np.nan
    send_dense(store, broken)
    with pytest.raises(
        NonFiniteError, match=r"gradient of weight block\.0\.weight of stage stage1"
    ):
        store.commit()
    store.discard()
    assert store.step == 2
    train_sparse(store, 3)
    train_sparse(plain, 5)
    assert_same_contents(contents(plain), contents(store))


@pytest.mark.parametrize("method", ["set", "rigl"])
def test_interrupted_mask_change_is_refused_and_not_applied_twice(method, monkeypatch):
    store = sparse_store(method)
    train_sparse(store, 3)  # the change of step 3 is pending
    move = store._memory.masters.move

    def interrupted(name, remap):
        move(name, remap)
        raise KeyboardInterrupt

    monkeypatch.setattr(store._memory.masters, "move", interrupted)
    with pytest.raises(KeyboardInterrupt):
        streamed(store)
    monkeypatch.undo()
    for use in (store.flush, store.content_hash, lambda: train_sparse(store, 1)):
        with pytest.raises(StorageError) as caught:
            use()
        assert str(caught.value) == (
            "the update of embed was interrupted, so the weights are not those of a complete step; "
            "open the run again: it continues from its last checkpoint"
        )
    plain = sparse_store(method)
    store.load(random_weights(store.program, 5).items())
    for one in (plain, store):
        train_sparse(one, 5)
    assert_same_contents(contents(plain), contents(store))


def test_mask_that_would_be_empty_commits_nothing():
    program = make_program([{"a": (8, 8)}], sparse={"a": 64})
    schedule = SparsitySchedule("linear", 0.999, 0.0, 1, 3)
    policy = GradualMagnitude({"a": schedule}, ChangeTimes(1, 3, 1))
    store = training_store(program, masks=MaskRule(policy, 0, "random", {"a": 1.0}))
    store.load(random_weights(program, 0).items())
    train_sparse(store, 2)
    before = contents(store)
    send_dense(store, dense_gradients(program, 2))
    with pytest.raises(ConfigError) as caught:
        store.commit()
    assert str(caught.value) == (
        "sparsity: the mask of a would keep no entry, expected at least 1; lower the sparsity, or "
        "leave this weight out of the sparse ones"
    )
    assert store.step == 2
    assert_same_contents(before, contents(store))


def test_master_that_is_not_finite_is_named_at_the_selection():
    store = sparse_store("set")
    train_sparse(store, 2)
    send_dense(store, dense_gradients(store.program, 2))
    store._memory.masters.weight("embed")[0][3] = np.inf
    with pytest.raises(NonFiniteError, match=r"^mask of embed: 1 of 320 values are NaN"):
        store.commit()


def test_decision_without_the_changes_of_its_step_is_refused():
    store = sparse_store("set")
    train_sparse(store, 2)
    send_dense(store, dense_gradients(store.program, 2))
    decision = store._rule.decide(store.program, 3, store.prepare()).decision
    with pytest.raises(StorageError) as caught:
        store.decide(decision)
    assert str(caught.value) == (
        "step 3: expected a decision that changes the masks of 3 weights, got one for 0, or with "
        "other numbers of entries; it changed nothing. Open the run again: it continues from its "
        "last checkpoint"
    )
    assert store.commit().decision.step == 3


@pytest.mark.parametrize("initial", ["random", "magnitude", "balanced", "zeros"])
def test_initial_masks_of_loaded_weights(initial):
    program, chance = sparse_program("static"), torch.Generator().manual_seed(4)
    weights = random_weights(program, 8)
    for name in SPARSE:
        weights[name][torch.rand(weights[name].shape, generator=chance) < 0.95] = 0.0
    masks = rule_of("static", initial)
    store = training_store(program, masks=masks)
    if initial == "magnitude":
        weights = random_weights(program, 8)
    store.load(weights.items())
    for name in SPARSE:
        values, mask = weights[name].reshape(-1).numpy(), store.mask(name).mask()
        if initial == "zeros":
            np.testing.assert_array_equal(mask, values != 0)
        else:
            assert mask.sum() == math.floor(mask.size * DENSITY[name] + 0.5)
        if initial == "magnitude":
            assert np.abs(values[mask]).min() >= np.abs(values[~mask]).max()
        np.testing.assert_array_equal(
            store.master(name).numpy().reshape(-1), np.where(mask, values, 0)
        )


def test_zeros_that_leave_no_entry_or_too_many_are_refused():
    program = sparse_program("static")
    weights = random_weights(program, 8)
    store = training_store(program, masks=rule_of("static", "zeros"))
    with pytest.raises(ConfigError) as caught:
        store.load(weights.items())
    assert str(caught.value) == (
        "sparsity: the mask of embed has 800 entries, its capacity is 320; use the sparsity with "
        "which the run was started"
    )
    weights["embed"][:] = 0
    with pytest.raises(ConfigError, match="the mask of embed would keep no entry"):
        store.load(weights.items())


def test_gradient_of_another_shape_is_refused():
    store = sparse_store("rigl")
    weights = streamed(store)
    kept = weights["block.1.weight"].index.kept
    scale = torch.zeros(())
    with pytest.raises(ValueError, match="expected float32") as caught:
        store.receive(2, [torch.zeros(64, 40), scale])
    assert str(caught.value) == (
        f"stage stage2: expected float32 [{kept}] as the gradient of block.1.weight, got "
        "torch.float32 [64, 40]"
    )
    train_sparse(store, 2)
    streamed(store)
    with pytest.raises(ValueError, match=r"expected float32 \[64, 40\] as the gradient"):
        store.receive(2, [torch.zeros(kept), scale])


def test_memory_is_that_of_the_entries():
    program = sparse_program("static", "bf16")
    store = empty_store(program, "static", "adamw 8bit", "bf16")
    entries = sum(program.weights[n].capacity for n in SPARSE)
    dense = sum(w.elements for w in program.weights.values() if w.name not in SPARSE)
    trained = entries + dense - program.weights["position"].elements
    found = store.memory_bytes
    padding = 64 * len(program.weights)
    assert 0 <= found["high"] - 2 * (entries + dense) < padding
    assert 0 <= found["exp_avg"] - trained < padding
    assert 0 <= found["gradient"] - 4 * trained < padding
    assert "age" not in found  # no entry ever regrows
    grows = empty_store(sparse_program("rigl"), "rigl").memory_bytes
    assert 0 <= grows["age"] - entries < padding
    assert grows["grown entries"] > 0
    assert grows["mask change"] == 24 * 910
    assert grows["dense gradients"] == 4 * 50 * 16  # of the weight that two stages use
    without = empty_store(sparse_program("set"), "set").memory_bytes
    assert without["dense gradients"] == 0
    assert passing_bytes(grows) == sum(
        grows[use] for use in ("dense gradients", "grown entries", "mask change")
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_account_before_allocation_is_the_memory_of_the_store(method, optimizer, precision):
    program = sparse_program(method, precision)
    for width, dtype in ((4, torch.float32), (2, torch.bfloat16)):
        account = dram_store_memory(program, OPTIMIZERS[optimizer], width, rule_of(method))
        store = empty_store(program, method, optimizer, precision, gradient_dtype=dtype)
        found = store.memory_bytes
        assert account.keys() == found.keys()
        for use, size in account.items():
            assert 0 <= found[use] - size < 64 * len(program.weights), use


@pytest.mark.long
@pytest.mark.parametrize("method", ["set", "rigl", "gmp"])
def test_change_of_masks_stays_within_its_account(method):
    """Beyond the slabs, NumPy allocates what the account says, and frees it."""
    side = 1500
    capacity = side * side // (1 if method == "gmp" else 5)
    shapes = dict.fromkeys("ab", (side, side))
    program = make_program([shapes], sparse=dict.fromkeys("ab", capacity))
    starts = dict.fromkeys("ab", capacity / side**2)
    policy = rule_of(method).policy
    if method == "gmp":
        schedule = SparsitySchedule("power", 0.8, 0.0, 4, 14)
        policy = GradualMagnitude({"a": schedule, "b": schedule}, policy.times)
    store = training_store(program, masks=MaskRule(policy, 3, "random", starts))
    store.load(random_weights(program, 0).items())
    train_sparse(store, 7)
    gradients = [dense_gradients(program, step) for step in range(7, 12)]
    store.flush()
    tracemalloc.start()
    for gradient in gradients:
        weights = streamed(store)
        sent = [
            torch.from_numpy(
                g if weights[n].dense_gradient else g.reshape(-1)[weights[n].index.positions()]
            )
            for n, g in gradient[0].items()
        ]
        del weights
        tracemalloc.reset_peak()
        held, _ = tracemalloc.get_traced_memory()
        store.receive(0, sent)
        store.commit()
        store.flush()
        _, peak = tracemalloc.get_traced_memory()
        account = store.memory_bytes
        beyond = account["mask change"] + account["grown entries"] + account["index"]
        print(f"step {store.step}: {peak - held:,} bytes of {beyond:,}")
        assert peak - held < beyond + 2_000_000
        del sent
    tracemalloc.stop()


def test_store_needs_a_rule_to_load_or_train_sparse_weights():
    program = sparse_program("static")
    with pytest.raises(ValueError, match="a store that trains sparse weights needs a mask rule"):
        training_store(program)
    with pytest.raises(ValueError, match="embed: a store needs a mask rule to load sparse weights"):
        DramStore(program, "fp32").load(random_weights(program, 0).items())


def test_dense_program_has_no_trace_of_masks():
    program = make_program(LAYERS)
    store = training_store(program)
    store.load(random_weights(program, 0).items())
    commits = train(store, 2, 0)
    assert all(commit.decision.masks == () for commit in commits)
    assert not {"index", "age", "grown entries", "mask change"} & set(store.memory_bytes)
    assert set(store.roles("embed")) == {"master", "exp_avg", "exp_avg_sq"}
    assert store.mask("embed") is None
