"""A store in shards does what one store does, to the bit; and no shard commits alone."""

import numpy as np
import pytest
import torch
from sharded_stores import (
    LARGE,
    assert_same_state,
    flash_store,
    sharded_dram,
    sharded_flash,
)
from store_programs import (
    forward_sweep,
    make_program,
    random_gradients,
    random_weights,
    send,
    train,
    training_store,
)

from penstock.engine.threads import set_threads
from penstock.errors import NonFiniteError, NoTrainingError, StorageError
from penstock.store import (
    SGD,
    AdamW,
    BackgroundSave,
    Lion,
    Schedule,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from penstock.store.flash import OtherStoreError

set_threads(1)  # for tensors this small a second thread is only waited for

EIGHT_BIT = AdamW(0.9, 0.95, 1e-8, moments="8bit")
OPTIMIZERS = [AdamW(0.9, 0.95, 1e-8), EIGHT_BIT, Lion(), SGD(), SGD(0.9, moments="8bit")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def program_of(precision="fp32"):
    return make_program(LARGE, frozen=("position", "2.weight"), stream_dtype=DTYPES[precision])


def loaded(store, seed=0):
    store.load(random_weights(store.program, seed).items())
    return store


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sharded_store_equals_one_store(precision, optimizer):
    """Clipped, so that one bit of the norm would change all weights; gradients in bfloat16."""
    program = program_of(precision)
    settings = {"optimizer": optimizer, "clip_norm": 1.0, "gradient_dtype": DTYPES[precision]}
    one = loaded(training_store(program, precision, **settings))
    commits, streamed = train(one, 6, seed=3), forward_sweep(one)
    for count in (1, 2, 3, 9):
        many = loaded(sharded_dram(program, count, precision, **settings))
        assert train(many, 6, seed=3) == commits
        for name, view in forward_sweep(many).items():
            assert torch.equal(streamed[name], view)
        assert many.unchanged() == one.unchanged() == ()
        assert_same_state(many, one)


@pytest.mark.parametrize(
    ("precision", "optimizer", "count"),
    [
        ("fp32", OPTIMIZERS[0], 2),
        ("fp32", EIGHT_BIT, 3),
        ("bf16", EIGHT_BIT, 2),
        ("bf16", Lion(), 9),  # some shards hold next to nothing
    ],
)
@pytest.mark.usefixtures("speculated")
def test_sharded_store_on_flash_equals_one_store(tmp_path, precision, optimizer, count):
    program = program_of(precision)
    one = loaded(training_store(program, precision, optimizer=optimizer))
    many = loaded(sharded_flash(program, tmp_path / "flash", count, optimizer=optimizer))
    assert train(many, 4, seed=3) == train(one, 4, seed=3)
    assert_same_state(many, one)
    many.make_durable()
    many.close()
    again = sharded_flash(program, tmp_path / "flash", count, optimizer=optimizer)
    assert not again.is_new
    assert train(again, 2, seed=3) == train(one, 2, seed=3)
    assert_same_state(again, one)
    again.close()


def test_norm_is_the_exact_sum_for_any_number_of_shards():
    program = program_of()
    commits = set()
    for count in (1, 2, 3, 4, 7, 64):
        store = loaded(sharded_dram(program, count, clip_norm=0.5))
        commits.add(tuple(train(store, 2, seed=5, scale=1e-3)))
    (commits,) = commits
    gradients = random_gradients(program, np.random.default_rng([5, 0]), 1e-3)
    whole = {}
    for stage, parts in sorted(gradients.items(), reverse=True):
        names = [n for n in program.stages[stage].weights if program.weights[n].trainable]
        for name, part in zip(names, parts, strict=True):
            whole[name] = part if name not in whole else whole[name] + part
    squares = np.concatenate([g.numpy().astype(np.float64).ravel() ** 2 for g in whole.values()])
    assert commits[0].decision.norm == pytest.approx(float(np.sqrt(squares.sum())), rel=1e-13)


def test_views_are_valid_until_the_second_fetch():
    program = program_of()
    store = loaded(sharded_dram(program, 2))
    weights = random_weights(program, 0)
    first, second = store.fetch(1), store.fetch(2)
    for stage, views in ((1, first), (2, second)):
        for name, view in zip(program.stages[stage].weights, views, strict=True):
            assert torch.equal(view, weights[name])
    assert [tuple(v.shape) for v in store.fetch(2, (2, 0))] == [(), (64, 640)]
    (embed, norm) = store.stream(["embed", "norm"])
    assert torch.equal(embed, weights["embed"])
    assert torch.equal(norm, weights["norm"])


def test_traffic_is_counted_as_for_one_store():
    program = program_of()
    one, many = loaded(training_store(program)), loaded(sharded_dram(program, 3))
    for store in (one, many):
        train(store, 2, seed=1)
    ours, theirs = many.take_traffic(), one.take_traffic()
    assert ours.streamed_bytes == theirs.streamed_bytes
    assert ours.gradient_bytes == theirs.gradient_bytes
    assembly = many.memory_bytes["assembly"]
    assert 2 * 500 * 61 * 4 <= assembly <= 2 * (64 * 640 * 4 + 64)
    stores = sum(one.memory_bytes.values())  # but for what pads the slabs
    assert abs(sum(many.memory_bytes.values()) - assembly - stores) <= 64 * 3 * 4 * len(LARGE) * 3


def test_read_and_restore_cross_piece_boundaries(tmp_path):
    """A checkpoint of any number of shards is that of one store, and any other number opens it."""
    program = program_of("bf16")
    stores = [
        loaded(sharded_dram(program, 3, "bf16", optimizer=EIGHT_BIT)),
        loaded(training_store(program, "bf16", optimizer=EIGHT_BIT)),
    ]
    saved = []
    for number, store in enumerate(stores):
        train(store, 3, seed=1)
        saved.append(save_checkpoint(store, tmp_path / str(number), {"note": 1}).folder)
    assert {p.name: p.read_bytes() for p in saved[0].iterdir()} == {
        p.name: p.read_bytes() for p in saved[1].iterdir()
    }
    other = sharded_dram(program, 2, "bf16", optimizer=EIGHT_BIT)
    assert load_checkpoint(other, saved[0]) == {"note": 1}
    assert_same_state(other, stores[1])
    assert train(other, 2, seed=1) == train(stores[1], 2, seed=1)
    for name, role, begin, end in (
        ("1.weight", "master", 20_000, 30_000),
        ("1.weight", "exp_avg_scale", 70, 90),
        ("1.weight", "exp_avg", 100, 100),
    ):
        np.testing.assert_array_equal(
            other.read(name, role, begin, end), stores[1].read(name, role, begin, end)
        )


@pytest.mark.parametrize("count", [2, 3])
def test_checkpoint_is_written_during_training(tmp_path, count):
    program = program_of()
    resting, store = loaded(training_store(program)), loaded(sharded_dram(program, count))
    train(resting, 2, seed=0)
    train(store, 2, seed=0)
    expected = save_checkpoint(resting, tmp_path / "resting", {}).folder
    save = BackgroundSave(store.snapshot(1 << 30), tmp_path / "going", {})
    train(store, 2, seed=0)
    save.wait()
    found = find_checkpoint(tmp_path / "going", "latest")
    assert {p.name: p.read_bytes() for p in found.iterdir()} == {
        p.name: p.read_bytes() for p in expected.iterdir()
    }
    train(resting, 2, seed=0)
    assert_same_state(store, resting)


# What is refused, and what is told


def test_missing_and_non_finite_gradients_are_named_as_by_one_store():
    program = program_of()
    stores = [loaded(training_store(program)), loaded(sharded_dram(program, 3))]
    told = []
    for store in stores:
        forward_sweep(store)
        gradients = random_gradients(program, np.random.default_rng(0))
        send(store, {0: gradients[0], 1: gradients[1]})
        with pytest.raises(NoTrainingError) as silent:
            store.commit()
        store.discard()
        send(store, {**gradients, 1: [None, gradients[1][1]]})
        with pytest.raises(NoTrainingError) as missing:
            store.commit()
        store.discard()
        gradients[1][0][129, 169] = np.nan  # the last element, in one shard only
        gradients[2][1][0] = np.inf
        send(store, gradients)
        with pytest.raises(NonFiniteError) as non_finite:
            store.commit()
        store.discard()
        assert store.step == 0
        told.append([str(error.value) for error in (silent, missing, non_finite)])
    assert told[0] == told[1]
    assert "no gradients were received from stages stage2, stage3, stage4;" in told[1][0]
    assert "no gradient for trainable weight 0.weight:" in told[1][1]
    assert "in the gradient of weight 1.bias of stage stage2, then of stage stage1;" in told[1][2]
    train(stores[0], 2, seed=1)
    train(stores[1], 2, seed=1)
    assert_same_state(stores[1], stores[0])


def test_a_gradient_of_another_shape_reaches_no_shard():
    program = program_of()
    store = loaded(sharded_dram(program, 2))
    gradients = random_gradients(program, np.random.default_rng(0))
    wrong = [gradients[1][0].T.contiguous(), gradients[1][1]]
    with pytest.raises(
        ValueError, match=r"stage1: expected float32 \[130.* as the gradient of 0.weight"
    ):
        store.receive(1, wrong)
    with pytest.raises(ValueError, match="each of 2 trainable weights, got 1 gradients"):
        store.receive(1, wrong[:1])
    send(store, gradients)
    with pytest.raises(RuntimeError, match="stage stage1 has sent its gradients twice"):
        store.receive(1, gradients[1])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("tier", ["memory", "flash"])
@pytest.mark.usefixtures("speculated")
def test_gradient_is_zero_only_if_every_piece_is_zero(tier, count, tmp_path):
    """Of `half`, one element in the last piece is not zero."""
    weights = {"half": (100, 200), "zero": (100, 200), "small": (3,), "empty": (0, 3)}
    program = make_program((weights,))
    if tier == "memory":
        store = sharded_dram(program, count)
    else:
        store = sharded_flash(program, tmp_path, count)
    store.load((name, torch.ones(s.shape)) for name, s in program.weights.items())
    gradients = [torch.zeros(shape) for shape in weights.values()]
    gradients[0][99, 199] = 1.0
    for _ in range(2):
        forward_sweep(store)
        store.receive(0, gradients)
        assert store.commit().zero_gradients == ("zero", "small")
    store.close()


def test_weight_is_unchanged_only_if_every_piece_is_unchanged():
    program = make_program(({"large": (100, 200), "mixed": (100, 200), "small": (3,)},))
    settings = {"weight_decay": 0.0, "schedule": Schedule("constant", peak=1e-9)}
    for store in training_store(program, **settings), sharded_dram(program, 2, **settings):
        values = {n: torch.full(s.shape, 1e6) for n, s in program.weights.items()}
        values["mixed"][99, 199] = 0.0  # the only element that an update of 1e-9 moves
        store.load(values.items())
        forward_sweep(store)
        store.receive(0, [torch.ones(s.shape) for s in program.weights.values()])
        store.commit()
        store.flush()
        assert store.unchanged() == ("large", "small")


def test_commit_interrupted_between_shards_makes_the_store_unusable(monkeypatch):
    program = program_of()
    store = loaded(sharded_dram(program, 2))
    forward_sweep(store)
    send(store, random_gradients(program, np.random.default_rng(0)))

    def interrupted(norm):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store.shards[1], "decide", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.commit()
    for look in (lambda: store.fetch(0), lambda: store.master("norm"), store.content_hash):
        with pytest.raises(StorageError, match="commit of step 1 was interrupted between two sh"):
            look()
    loaded(store)
    assert_same_state(store, loaded(training_store(program)))


# On flash: what a folder holds


def test_swapped_shards_are_refused(tmp_path):
    program = make_program([{"a": (4 * 4096,)}])
    store = loaded(sharded_flash(program, tmp_path / "flash", 2))
    store.close()
    one, two = (tmp_path / "flash" / f"shard-{number}" for number in range(2))
    one.rename(tmp_path / "aside")
    two.rename(one)
    (tmp_path / "aside").rename(two)
    with pytest.raises(OtherStoreError, match="first element 8192 there, 0 now"):
        sharded_flash(program, tmp_path / "flash", 2)


def test_other_shard_count_second_process_and_second_load_are_refused(tmp_path):
    program = make_program([{"a": (4 * 4096,)}])
    loaded(flash_store(program, tmp_path / "one")).close()
    with pytest.raises(OtherStoreError, match="holds a store in 1 shard, the config"):
        sharded_flash(program, tmp_path / "one", 2)
    store = loaded(sharded_flash(program, tmp_path / "two", 2))
    with pytest.raises(StorageError, match="is in use by process"):
        sharded_flash(program, tmp_path / "two", 2)
    with pytest.raises(RuntimeError, match="is initialised once"):
        store.load(random_weights(program, 1).items())
    store.close()
