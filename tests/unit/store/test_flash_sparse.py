"""Sparse weights on flash have the bits of those in memory, after every step and every reopen."""

import math

import numpy as np
import pytest
import torch
from grids import quick_first, thinned
from sparse_training import (
    CLIP,
    LAYERS,
    METHODS,
    OPTIMIZERS,
    PRUNING,
    SEED,
    SPARSE,
    assert_same_contents,
    contents,
    dense_gradients,
    empty_store,
    policy_of,
    rule_of,
    send_dense,
    sparse_program,
    train_sparse,
)
from store_programs import (
    least_flash_bytes,
    make_program,
    random_weights,
    training_store,
)

from penstock.errors import BudgetError, CorruptionError
from penstock.sparsity import GradualMagnitude, SparsitySchedule
from penstock.store import MaskRule, load_checkpoint, save_checkpoint
from penstock.store.flash import (
    OtherStoreError,
    Repaired,
    least_dram_bytes,
    open_reader,
    repair,
)
from penstock.store.flash.journal import read_records
from penstock.store.flash.layout import BLOCK_ELEMENTS
from penstock.store.roles import MASTER

DRAM = 900_000


@pytest.fixture
def sparse_flash(flash):
    """Return a maker of stores on flash for a method of sparse training."""

    def make(method, optimizer="adamw", precision="fp32", folder="flash", **settings):
        return flash(
            sparse_program(method, precision),
            folder,
            optimizer=OPTIMIZERS[optimizer],
            clip_norm=CLIP,
            masks=rule_of(method),
            **{"dram": DRAM, **settings},
        )

    return make


def loaded(store):
    store.load(random_weights(store.program, 5).items())
    return store


def in_memory(method, optimizer="adamw", precision="fp32", **settings):
    return loaded(
        empty_store(sparse_program(method, precision), method, optimizer, precision, **settings)
    )


@pytest.mark.parametrize(
    ("method", "optimizer", "precision"),
    thinned(list(METHODS), ["adamw", "adamw 8bit"], ["fp32", "bf16"], others=pytest.mark.long),
)
@pytest.mark.usefixtures("speculated")
def test_flash_store_equals_store_in_memory(sparse_flash, method, optimizer, precision):
    ours = loaded(sparse_flash(method, optimizer, precision))
    theirs = in_memory(method, optimizer, precision)
    assert_same_contents(contents(ours), contents(theirs))
    for _ in range(4):
        assert train_sparse(ours, 4) == train_sparse(theirs, 4)
        assert_same_contents(contents(ours), contents(theirs))
    assert ours.content_hash() == theirs.content_hash()
    assert ours.unchanged() == theirs.unchanged()


@pytest.mark.parametrize("method", ["static", "rigl"])
def test_stage_may_have_more_sparse_weights_than_gradients_have_slabs(flash, method):
    """With the least memory, the gradient of every weight goes to flash through one of two
    slabs."""
    shapes = {"a": (130, 70), "b": (64, 40), "c": (50, 48), "d": (90, 30)}
    kept = {name: rows * columns // 4 for name, (rows, columns) in shapes.items()}
    fillers = [{f"filler {number}": (160, 128)} for number in range(8)]
    program = make_program([*fillers, {**shapes, "bias": (16,)}], sparse=kept)
    masks = MaskRule(policy_of(method), SEED, "random", dict.fromkeys(shapes, 0.25))
    more = {"clip_norm": CLIP, "masks": masks}
    ours = flash(program, dram=least_flash_bytes(program, **more), **more)
    assert all(ours._layout.unit(name) in ours._spill for name in [*shapes, "bias"])
    theirs = training_store(program, **more)
    loaded(ours)
    loaded(theirs)
    for _ in range(2):
        assert train_sparse(ours, 4) == train_sparse(theirs, 4)
        assert_same_contents(contents(ours), contents(theirs))


def reopened(make, store, *arguments, **settings):
    """Close a store on flash, and open it again in another object."""
    store.close()
    return make(*arguments, **settings)


@pytest.mark.parametrize(
    ("method", "optimizer", "precision"),
    [
        ("static", "adamw", "bf16"),
        ("gmp", "adamw 8bit", "fp32"),
        ("set", "adamw", "bf16"),
        ("rigl", "adamw 8bit", "bf16"),
        ("densify rigl", "adamw", "fp32"),
    ],
)
@pytest.mark.usefixtures("speculated")
def test_store_that_is_reopened_at_every_step_has_the_same_bits(
    sparse_flash, method, optimizer, precision
):
    ours = loaded(sparse_flash(method, optimizer, precision))
    theirs = in_memory(method, optimizer, precision)
    for step in range(1, 17):
        assert train_sparse(ours, 1) == train_sparse(theirs, 1)
        ours.make_durable()
        ours = reopened(sparse_flash, ours, method, optimizer, precision)
        assert ours.step == step
        assert ours.content_hash() == theirs.content_hash()
    assert_same_contents(contents(ours), contents(theirs))


@pytest.mark.parametrize("method", ["set", "rigl"])
@pytest.mark.usefixtures("speculated")
def test_store_that_is_closed_before_a_step_is_durable_loses_at_most_that_step(
    sparse_flash, method
):
    ours, theirs = loaded(sparse_flash(method)), in_memory(method)
    for stop in (3, 4, 8, 12):
        train_sparse(ours, stop - ours.step)
        ours = reopened(sparse_flash, ours, method)
        assert ours.step in (stop - 1, stop)
    train_sparse(ours, 13 - ours.step)
    train_sparse(theirs, 13)
    assert_same_contents(contents(ours), contents(theirs))


LARGE = ({"a": (160, 150), "a.bias": (150,)}, {"b": (96, 130)}, {"c": (64, 150)})
LARGE_DENSITY = {"a": 0.5, "b": 0.6}  # 12,000 and 7,488 entries: a block has up to 4,096
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def large_program(method, precision="fp32"):
    starts = dict.fromkeys(LARGE_DENSITY, 0.9) if method == "gmp" else LARGE_DENSITY
    elements = {name: math.prod(shape) for layer in LARGE for name, shape in layer.items()}
    lifts = method.startswith("densify")
    kept = {n: math.floor(elements[n] * (1 if lifts else starts[n]) + 0.5) for n in starts}
    policy = policy_of(method)
    if method == "gmp":
        schedules = {
            n: SparsitySchedule("power", 1 - d, 0.1, 4, 14) for n, d in LARGE_DENSITY.items()
        }
        policy = GradualMagnitude(schedules, PRUNING)
    rule = MaskRule(policy, SEED, "random", starts)
    return make_program(LARGE, stream_dtype=PRECISIONS[precision], sparse=kept), rule


@pytest.mark.parametrize(
    ("method", "optimizer", "precision", "half"),
    [
        ("static", "adamw 8bit", "bf16", False),
        ("gmp", "adamw", "bf16", False),
        pytest.param("set", "adamw 8bit", "fp32", True, marks=pytest.mark.long),
        ("rigl", "adamw 8bit", "bf16", True),
        ("rigl", "momentum", "fp32", False),
        ("set", "sgd", "fp32", False),
        ("densify rigl", "lion 8bit", "bf16", False),
    ],
)
@pytest.mark.parametrize("room", quick_first(["least", "ample", "seldom durable"], ["least"]))
@pytest.mark.usefixtures("speculated")
def test_weights_of_many_blocks_have_the_same_bits_in_any_memory(
    flash, method, optimizer, precision, half, room
):
    (program, rule), made = large_program(method, precision), OPTIMIZERS[optimizer]
    dtype = torch.bfloat16 if half else torch.float32
    least = least_flash_bytes(program, optimizer=made, gradient_dtype=dtype, masks=rule)
    settings = {"optimizer": made, "clip_norm": CLIP, "gradient_dtype": dtype, "masks": rule}
    settings["dram"] = least if room == "least" else 20_000_000
    settings["durable_every"] = 3 if room == "seldom durable" else 1
    ours = loaded(flash(program, **settings))
    assert len(ours._version.blocks(ours._layout.unit("a"))) > 1
    assert sum(ours.memory_bytes.values()) <= settings["dram"]
    theirs = loaded(
        training_store(
            program,
            precision,
            optimizer=made,
            clip_norm=CLIP,
            gradient_dtype=dtype,
            masks=rule,
        )
    )
    assert train_sparse(ours, 8) == train_sparse(theirs, 8)
    ours.make_durable()
    ours = reopened(flash, ours, program, **settings)
    assert ours.step == 8
    assert train_sparse(ours, 8) == train_sparse(theirs, 8)
    assert_same_contents(contents(ours), contents(theirs))


@pytest.mark.parametrize("method", ["set", "rigl"])
@pytest.mark.usefixtures("speculated")
def test_discarded_step_is_replayed_to_the_same_bits(sparse_flash, method):
    ours, theirs = loaded(sparse_flash(method)), in_memory(method)
    train_sparse(ours, 2)
    wrong = dense_gradients(ours.program, 99)
    send_dense(ours, {stage: wrong[stage] for stage in (3, 2)})
    ours.discard()
    train_sparse(ours, 3)
    train_sparse(theirs, 5)
    assert_same_contents(contents(ours), contents(theirs))


def flip(path, place):
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 8]))


def test_damaged_mask_is_named_and_repair_rolls_back_before_its_change(sparse_flash, tmp_path):
    store, hashes = loaded(sparse_flash("set")), []
    for _ in range(3):  # the third changes the masks
        hashes.append(store.content_hash())
        train_sparse(store, 1)
        store.make_durable()
    unit = store._layout.unit("block.0.weight")
    stored = store._version.masks._masks[unit.index]
    begin = unit.mask_offset(stored.place)
    store.close()
    folder = tmp_path / "flash"
    flip(folder / "extents", begin + stored.size - 1)
    named = rf"extents: damaged in bytes {begin:,} to {begin + stored.size:,}, which hold the mask"
    with pytest.raises(CorruptionError, match=rf"{named} of block\.0\.weight: expected checksum"):
        sparse_flash("set")
    with open_reader(folder) as reader, pytest.raises(CorruptionError, match=named):
        reader.verify(3)
    assert repair(folder) == Repaired(step=2, discarded=(3,), damaged_journal=False)
    store = sparse_flash("set")
    assert store.content_hash() == hashes[2]
    theirs = in_memory("set")
    train_sparse(store, 5)
    train_sparse(theirs, 7)
    assert_same_contents(contents(store), contents(theirs))


def test_damage_to_any_block_of_a_sparse_weight_is_named(flash, tmp_path):
    program, rule = large_program("rigl", "bf16")
    settings = {"optimizer": OPTIMIZERS["adamw 8bit"], "masks": rule, "dram": 2_000_000}
    store = loaded(flash(program, **settings))
    train_sparse(store, 3)
    store.make_durable()
    unit, version = store._layout.unit("a"), store._version
    place = version._place[unit.index]
    ends = [
        byte
        for block in version.blocks(unit)
        for byte in (
            unit.stream_offset(place, block.begin),
            unit.stream_offset(place, block.end) - 1,
            unit.state_offset(place, block),
            unit.state_offset(place, block) + block.state_bytes - 1,
        )
    ]
    store.close()
    path = tmp_path / "flash" / "extents"
    for byte in ends:
        flip(path, byte)
        with (
            open_reader(path.parent) as reader,
            pytest.raises(CorruptionError, match=r"which hold the (weights|state) of a: expected"),
        ):
            reader.verify(3)
        flip(path, byte)
    with open_reader(path.parent) as reader:
        reader.verify(3)


def test_reader_shows_masks_values_and_hash(sparse_flash, tmp_path):
    store = loaded(sparse_flash("rigl", precision="bf16"))
    train_sparse(store, 4)
    store.make_durable()
    masters = {name: store.master(name).reshape(-1).numpy() for name in store.program.weights}
    masks, found = {name: store.mask(name) for name in SPARSE}, store.content_hash()
    store.close()
    with open_reader(tmp_path / "flash") as reader:
        assert reader.content_hash(4) == found
        assert reader.sparse == {name: store.program.weights[name].shape for name in SPARSE}
        assert reader.kept == {name: mask.kept for name, mask in masks.items()}
        for name, values in masters.items():
            np.testing.assert_array_equal(reader.read(name, MASTER, 0, values.size), values)
            begin, end = values.size // 3, values.size - values.size // 4
            inside = reader.read(name, MASTER, begin, end)
            np.testing.assert_array_equal(inside, values[begin:end])
        for name, mask in masks.items():
            assert reader.mask(name).same_mask(mask)
        assert reader.mask("norm") is None


@pytest.mark.parametrize("optimizer", ["adamw", "adamw 8bit"])
def test_checkpoint_goes_from_flash_to_memory_and_back(sparse_flash, tmp_path, optimizer):
    ours = loaded(sparse_flash("rigl", optimizer, "bf16"))
    train_sparse(ours, 5)
    saved = save_checkpoint(ours, tmp_path / "checkpoints", {})
    theirs = empty_store(ours.program, "rigl", optimizer, "bf16")
    load_checkpoint(theirs, saved.folder)
    assert_same_contents(contents(ours), contents(theirs))
    other = sparse_flash("rigl", optimizer, "bf16", folder="other")
    load_checkpoint(other, saved.folder)
    assert other.durable_step == 5
    other = reopened(sparse_flash, other, "rigl", optimizer, "bf16", folder="other")
    for store in (ours, theirs, other):
        train_sparse(store, 4)
    assert_same_contents(contents(ours), contents(theirs))
    assert_same_contents(contents(other), contents(theirs))


def test_another_capacity_is_refused(flash):
    program, rule = large_program("set")
    flash(program, masks=rule, dram=2_000_000).close()
    other = make_program(LARGE, sparse={"a": 12_001, "b": program.weights["b"].capacity})
    with pytest.raises(OtherStoreError, match=r"'a': room for entries 12000 there, 12001 now"):
        flash(other, masks=rule, dram=2_000_000)


def test_store_on_flash_needs_a_rule_for_sparse_weights(flash):
    with pytest.raises(ValueError, match="a store that trains sparse weights needs a mask rule"):
        flash(sparse_program("static"))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw 8bit"])
@pytest.mark.parametrize("method", ["static", "gmp", "rigl"])
def test_least_memory_is_known_before_the_store_is_opened(flash, method, optimizer):
    program, rule = large_program(method)
    made = OPTIMIZERS[optimizer]
    settings = {"optimizer": made, "masks": rule, "block_elements": BLOCK_ELEMENTS}
    least = least_dram_bytes(program, made, half_gradients=False, masks=rule)
    with pytest.raises(BudgetError, match=rf"raise store\.dram to {least:,} or more") as caught:
        flash(program, dram=least - 1, **settings)
    assert ", masks and their changes " in str(caught.value)
    store = loaded(flash(program, dram=least, **settings))
    train_sparse(store, 4)
    assert sum(store.memory_bytes.values()) <= least


def test_dense_store_is_described_as_before(flash, tmp_path):
    store = loaded(flash(make_program(LAYERS)))
    train_sparse(store, 1)
    store.make_durable()
    store.close()
    first, *records = read_records(tmp_path / "flash" / "journal")[0]
    assert first.content["version"] == 2
    assert all("capacity" not in unit for unit in first.content["units"])
    assert all(record.content.keys() == {"step", "places", "extra"} for record in records)
