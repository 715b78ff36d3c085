"""Checkpoints and snapshots of sparse weights: equal bits, across changes of masks."""

import itertools
import math

import numpy as np
import pytest
import torch
from grids import thinned
from sparse_training import (
    DENSITY,
    LAYERS,
    METHODS,
    SPARSE,
    assert_same_contents,
    contents,
    dense_gradients,
    empty_store,
    rule_of,
    send_dense,
    sparse_program,
    sparse_store,
    streamed,
    train_sparse,
)
from store_programs import make_program, random_weights, training_store

from penstock.errors import ConfigError, CorruptionError
from penstock.store import (
    MASTER,
    BackgroundSave,
    Base,
    DramStore,
    SavedWeights,
    checkpoint_hash,
    load_checkpoint,
    read_state,
    save_checkpoint,
    verify_checkpoint,
)
from penstock.store.checkpoint import state as state_module
from penstock.store.roles import AGE, CHANGES, INDEX, VALUES

STEPS = 18


def saved_at(tmp_path, method, step, optimizer="adamw", precision="fp32"):
    """A store, and the folder of its checkpoint after so many steps."""
    store = sparse_store(method, optimizer, precision)
    train_sparse(store, step)
    return store, save_checkpoint(store, tmp_path, {"a": 1}).folder


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [2, 3, 4, 9, 14])
def test_run_continues_from_a_checkpoint_to_the_same_bits(tmp_path, method, step):
    """Before, at and after a change of masks; and at the step at which masks are lifted."""
    store, folder = saved_at(tmp_path, method, step)
    restored = empty_store(store.program, method)
    assert load_checkpoint(restored, folder) == {"a": 1}
    assert restored.step == step
    assert_same_contents(contents(store), contents(restored))
    assert train_sparse(store, STEPS - step) == train_sparse(restored, STEPS - step)
    assert_same_contents(contents(store), contents(restored))
    for name, weight in streamed(restored).items():
        if name in SPARSE:
            (other,) = store.stream([name])
            assert weight.version == other.version


@pytest.mark.parametrize("optimizer", ["adamw 8bit", "sgd", "momentum 8bit", "lion"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_optimizer_continues_to_the_same_bits(tmp_path, optimizer, precision):
    store, folder = saved_at(tmp_path, "rigl", 8, optimizer, precision)
    restored = empty_store(store.program, "rigl", optimizer, precision)
    load_checkpoint(restored, folder)
    assert train_sparse(store, 8) == train_sparse(restored, 8)
    assert_same_contents(contents(store), contents(restored))
    assert restored.unchanged() == ()


@pytest.mark.parametrize(
    ("method", "when"),
    thinned(METHODS, [*itertools.product([0, 20_000], [3, 6, 7, 9, 13])], others=pytest.mark.long),
)
def test_snapshot_is_the_checkpoint_of_its_step(tmp_path, method, when):
    """Written while later steps go on, of which one or more change the masks again."""
    buffer_bytes, step = when
    plain, folder = saved_at(tmp_path / "plain", method, step, "adamw 8bit")
    store = sparse_store(method, "adamw 8bit")
    train_sparse(store, step)
    save = BackgroundSave(store.snapshot(buffer_bytes), tmp_path / "background", {"a": 1})
    train_sparse(store, STEPS - step)
    background = save.wait().folder
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in background.iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (background / name).read_bytes(), name
    train_sparse(plain, STEPS - step)
    assert_same_contents(contents(plain), contents(store))


def test_snapshot_that_is_read_last_has_the_old_masks(tmp_path):
    """Nothing is read until four more steps are committed: all of it comes from copies."""
    store, folder = saved_at(tmp_path, "set", 5)
    other = sparse_store("set")
    train_sparse(other, 5)
    snapshot = other.snapshot(10**9)
    train_sparse(other, 4)
    for name in store.program.weights:
        for role, stored in snapshot.roles(name).items():
            pieces = list(snapshot.pieces(name, role, 100))
            found = np.concatenate(pieces)
            count = math.prod(stored.shape)
            assert found.tobytes() == store.read(name, role, 0, count).tobytes(), (name, role)
    snapshot.close()
    assert verify_checkpoint(folder).step == 5


def test_checkpoint_holds_entries_masks_and_ages(tmp_path):
    store, folder = saved_at(tmp_path, "rigl", 9)
    state = read_state(folder)
    assert state.sparse == {name: store.program.weights[name].shape for name in SPARSE}
    assert state.weights == dict(store.shapes)
    for name in SPARSE:
        kept = store.mask(name).kept
        extents = {r: state.tensors[f"{r}/{name}"].extent for r in store.roles(name)}
        assert {role: extent.shape for role, extent in extents.items() if role != INDEX} == {
            VALUES: (kept,),
            "exp_avg": (kept,),
            "exp_avg_sq": (kept,),
            AGE: (kept,),
            CHANGES: (3,),
        }
        assert extents[INDEX].shape[0] <= kept
        # Steps 3 and 7 change masks instead of weights: 7 updates, 2 before the first change.
        assert store.read(name, CHANGES, 0, 3).tolist() == [7, 2, 5]
    assert MASTER in store.roles("norm")


@pytest.mark.parametrize("method", METHODS)
def test_saved_weights_are_read_in_any_pieces(tmp_path, method):
    store, folder = saved_at(tmp_path, method, 10, precision="bf16")
    saved = SavedWeights(folder)
    assert saved.shapes == dict(store.shapes)
    generator = np.random.default_rng(1)
    for name, shape in saved.shapes.items():
        dense = store.master(name).numpy().reshape(-1)
        elements = math.prod(shape)
        for begin, end in [(0, elements), *np.sort(generator.integers(0, elements + 1, (9, 2)))]:
            for reader in (saved, store):
                np.testing.assert_array_equal(
                    reader.read(name, MASTER, int(begin), int(end)), dense[begin:end]
                )
        mask, ours = saved.mask(name), store.mask(name)
        assert (mask is None) == (ours is None) == (name not in SPARSE)
        assert mask is None or mask.same_mask(ours)


@pytest.mark.parametrize("method", METHODS)
def test_hash_of_store_and_checkpoint_agree_and_cover_the_mask(tmp_path, method):
    store, folder = saved_at(tmp_path, method, 10)
    assert store.content_hash() == checkpoint_hash(folder)
    program = make_program([{"a": (8, 8)}], sparse={"a": 64})
    hashes = set()
    weight = torch.zeros(8, 8)
    weight[0, 0] = 1.0
    for absent in (1, 2, None):
        given = weight.clone()
        given[given == 0] = 2.0
        if absent is not None:
            given[absent] = 0.0
        other = training_store(program, masks=rule_of("static", "zeros"))
        other.load([("a", given)])
        # The same dense values, of which other ones are entries.
        other._memory.masters.weight("a")[0][:] = 0.0
        hashes.add(other.content_hash())
    assert len(hashes) == 3


def test_checkpoint_of_another_sparsity_is_refused(tmp_path):
    store, folder = saved_at(tmp_path, "static", 2)
    dense = training_store(make_program(LAYERS, frozen=("position",)))
    end = (
        "; use the sparsity section that wrote it, or export it and start a new run from the "
        "export (model.hf)"
    )
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(dense, folder)
    assert str(caught.value) == (
        f"{folder}: a checkpoint of another sparsity: embed is sparse in it, and dense in this "
        "run; block.0.weight is sparse in it, and dense in this run; block.1.weight is sparse in "
        "it, and dense in this run" + end
    )
    smaller = {name: math.floor(share * 100) for name, share in DENSITY.items()}
    program = make_program(LAYERS, frozen=("position",), sparse=smaller)
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(empty_store(program, "static"), folder)
    assert str(caught.value) == (
        f"{folder}: a checkpoint of another sparsity: embed keeps 320 of 800 entries in it, this "
        "run has room for 40; block.0.weight keeps 910 of 9,100 entries in it, this run has room "
        "for 10; block.1.weight keeps 640 of 2,560 entries in it, this run has room for 25" + end
    )
    dense.load(random_weights(dense.program, 0).items())
    other = save_checkpoint(dense, tmp_path / "dense", {}).folder
    before = contents(store)
    with pytest.raises(ConfigError, match="embed is dense in it, and sparse in this run"):
        load_checkpoint(store, other)
    assert_same_contents(before, contents(store))
    with pytest.raises(ConfigError, match="another optimizer: age/embed is missing"):
        load_checkpoint(empty_store(sparse_program("static"), "set"), folder)


def test_damaged_mask_is_refused(tmp_path, monkeypatch):
    store, folder = saved_at(tmp_path, "rigl", 8)
    place = read_state(folder).tensors[f"{INDEX}/embed"]
    path = folder / place.file
    data = bytearray(path.read_bytes())
    data[place.extent.begin] = 7  # neither of the two codes of an index
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="damaged in bytes"):
        load_checkpoint(empty_store(store.program, "rigl"), folder)
    with pytest.raises(CorruptionError, match="packed index: expected 0 or 1 as the first byte"):
        load_checkpoint(empty_store(store.program, "rigl"), folder, verify=False)
    with pytest.raises(CorruptionError, match="damaged in bytes"):
        SavedWeights(folder).mask("embed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("embed"), "'values/embed' is not that of a sparse weight"),
        (lambda s: s.update(embed=[3, 3]), "sparse weight 'embed' of shape [3, 3] has 320 entries"),
        (lambda s: s.update(embed="x"), "its sparse weights are described by"),
        (lambda s: s.update(norm=[16]), "sparse weight 'norm' needs entries and a mask"),
    ],
)
def test_description_of_sparse_weights_is_checked(tmp_path, change, message):
    from penstock.store import sealed_json

    store, folder = saved_at(tmp_path, "static", 1)
    path = folder / state_module.STATE_NAME
    content = sealed_json.unseal(path)
    assert content["version"] == 3
    change(content["sparse"])
    path.write_bytes(sealed_json.seal(content))
    with pytest.raises((ConfigError, CorruptionError)) as caught:
        load_checkpoint(store, folder)
    assert message in str(caught.value)


def test_restored_counts_of_updates_must_fit_the_step():
    store = sparse_store("rigl")
    train_sparse(store, 8)
    saved = contents(store)
    for wrong in ([9, 2, 5], [6, 5, 2], [6, 2, 7], [-1, 2, 5]):
        restored = empty_store(store.program, "rigl")
        restored.begin_restore()
        for (name, role), array in saved.items():
            given = np.array(wrong) if role == CHANGES and name == "embed" else array
            restored.write(name, role, 0, given)
        with pytest.raises(CorruptionError, match="mask_changes of embed: expected numbers"):
            restored.finish_restore(8)


def test_parts_of_another_length_are_refused():
    store = sparse_store("rigl", "adamw 8bit")
    train_sparse(store, 4)
    saved = contents(store)
    restored = empty_store(store.program, "rigl", "adamw 8bit")
    restored.begin_restore()
    for (name, role), array in saved.items():
        restored.write(name, role, 0, array[:-1] if role == "exp_avg_scale" else array)
    with pytest.raises(CorruptionError, match="exp_avg_scale of embed: its mask needs 2 values"):
        restored.finish_restore(4)


def test_frozen_sparse_weight_is_saved_and_never_in_the_base(tmp_path):
    program = sparse_program("static", frozen=("position", "block.1.weight"))
    store = empty_store(program, "static")
    store.load(random_weights(program, 5).items())
    train_sparse(store, 2)
    base = Base.held_by(store, "f", ["position", "block.1.weight"])
    assert set(base.weights) == {"position"}
    assert set(store.roles("block.1.weight")) == {VALUES, INDEX}
    folder = save_checkpoint(store, tmp_path, {}, base=base).folder
    restored = empty_store(program, "static")
    position = random_weights(program, 5)["position"]
    load_checkpoint(restored, folder, base=lambda names: [("position", position)])
    assert_same_contents(contents(store), contents(restored))


def test_store_without_optimizer_streams_a_restored_checkpoint(tmp_path):
    store, folder = saved_at(tmp_path, "static", 3, "sgd")
    frozen = sparse_program("static", frozen=tuple(store.program.weights))
    reader = DramStore(frozen, "fp32")
    with pytest.raises(ConfigError, match="is only in it"):
        load_checkpoint(reader, folder)
    restored = DramStore(store.program, "fp32")
    load_checkpoint(restored, folder)
    assert restored.content_hash() == store.content_hash()
    for name in SPARSE:
        assert torch.equal(restored.stream([name])[0].values, store.stream([name])[0].values)


def test_dense_gradients_are_not_held_beyond_their_stage():
    """Only of a weight that two stages use, until the second has sent its part."""
    store = sparse_store("rigl")
    train_sparse(store, 2)
    weights, gradients = streamed(store), dense_gradients(store.program, 2)
    sums = store._gradients._dense._sums
    for stage in (3, 2, 1):
        send_dense(store, {stage: gradients[stage]}, weights)
        assert set(sums) == {"embed"}
    send_dense(store, {0: gradients[0]}, weights)
    assert not sums
    assert store.commit().decision.replaces_update
