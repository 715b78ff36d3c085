"""Sparse weights in shards on flash: the bits of one store in memory, whatever happens between."""

import json

import numpy as np
import pytest
import torch
from grids import quick_first
from sharded_stores import sharded_flash
from sparse_stores import (
    DENSITY,
    LAYERS,
    SPARSE,
    STEPS,
    assert_same_sparse_state,
    assert_same_streams,
    mask_rule,
    sparse_program,
    sparse_store,
    step,
)
from store_programs import flash_store, least_flash_bytes, random_weights

from penstock.errors import CorruptionError, NonFiniteError
from penstock.sparsity import RigL
from penstock.store import AdamW, MaskRule, ShardMap, load_checkpoint, save_checkpoint
from penstock.store.flash import Repaired, open_reader, repair
from penstock.store.flash.frames import Frames, Visit
from penstock.store.roles import MASTER

EIGHT_BIT = AdamW(0.9, 0.95, 1e-8, moments="8bit")
CLIP, DRAM = 1.0, 4_000_000


@pytest.fixture
def make(tmp_path):
    """Return a maker of stores in shards on flash; whatever it made is closed."""
    made = []

    def make(policy, count, dtype=torch.float32, folder="flash", rule=None, program=None, **more):
        program = program or sparse_program(policy, dtype)
        settings = {
            "clip_norm": CLIP,
            "masks": rule or mask_rule(policy),
            "dram_bytes": DRAM,
            **more,
        }
        made.append(sharded_flash(program, tmp_path / folder, count, **settings))
        return made[-1]

    yield make
    for store in made:
        store.close()


def in_memory(policy, dtype=torch.float32, rule=None, program=None, **more):
    """A store without shards, in memory, before anything is loaded."""
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    program = program or sparse_program(policy, dtype)
    return sparse_store(program, rule or mask_rule(policy), precision, clip_norm=CLIP, **more)


def loaded(*stores, last=0.0):
    """Load the same weights; with `last`, larger ones towards the end of each."""
    weights = random_weights(stores[0].program, 1)
    for value in weights.values() if last else ():
        flat = value.view(-1)
        flat *= torch.linspace(0.01, last, flat.numel())
    for store in stores:
        store.load(weights.items())
    return stores


def assert_same_steps(ours, theirs, steps=STEPS):
    for _ in range(steps):
        (one, streamed), (other, also) = step(theirs, 5), step(ours, 5)
        assert one == other
        assert_same_streams(also, streamed)
    assert_same_sparse_state(ours, theirs)


CASES = [
    ("rigl", 1, "fp32"),
    ("rigl", 2, "8bit"),
    ("gmp", 3, "fp32"),
    ("set", 4, "fp32"),
    ("densify", 2, "fp32"),
    *[(policy, count, "8bit") for policy in ("gmp", "set", "densify") for count in (1, 3, 5)],
    ("rigl", 4, "fp32"),
    ("static", 3, "fp32"),
]


@pytest.mark.parametrize("case", quick_first(CASES, CASES[:4]), ids=str)
@pytest.mark.usefixtures("speculated")
def test_shards_on_flash_have_the_bits_of_one_store_in_memory(case, make):
    policy, count, moments = case
    optimizer = AdamW(0.9, 0.95, 1e-8, moments=moments)
    ours = make(policy, count, optimizer=optimizer)
    (ours, theirs) = loaded(ours, in_memory(policy, optimizer=optimizer))
    assert_same_sparse_state(ours, theirs)
    assert_same_steps(ours, theirs)
    assert ours.unchanged() == theirs.unchanged()


@pytest.mark.long
@pytest.mark.usefixtures("speculated")
def test_shards_that_are_reopened_at_every_step_have_the_same_bits(make):
    """All gradients but those of tied weights are on flash from their arrival to their update."""
    program = sparse_program(
        "rigl", torch.bfloat16, [*({f"d{i}": (160, 128)} for i in range(6)), *LAYERS]
    )
    more = {"optimizer": EIGHT_BIT, "gradient_dtype": torch.bfloat16}
    theirs = in_memory("rigl", torch.bfloat16, program=program, **more)
    parts = ShardMap.of(theirs.program, 3).parts(theirs.program)
    least = max(least_flash_bytes(part, masks=mask_rule("rigl"), **more) for part in parts)
    more |= {"program": program, "dram_bytes": least}
    ours = make("rigl", 3, **more)
    assert all(shard._layout.unit("1.weight") in shard._spill for shard in ours.shards)
    loaded(ours, theirs)
    for number in range(1, STEPS + 1):
        assert step(ours, 5)[0] == step(theirs, 5)[0]
        ours.make_durable()
        ours.close()
        ours = make("rigl", 3, **more)
        assert ours.step == number
        assert ours.mask_sizes == theirs.mask_sizes
    assert_same_sparse_state(ours, theirs)


@pytest.mark.usefixtures("speculated")
def test_stores_that_are_closed_before_a_step_is_durable_replay_it(make):
    ours, theirs = loaded(make("set", 2), in_memory("set"))
    for stop in (2, 3, 6):
        while ours.step < stop:
            step(ours, 5)
        ours.close()
        ours = make("set", 2)
        assert ours.step in (stop - 1, stop)
    while theirs.step < ours.step:
        step(theirs, 5)
    assert_same_steps(ours, theirs, 2)


@pytest.mark.usefixtures("speculated")
def test_part_of_a_mask_outgrows_its_plan(make):
    """Nearly all entries are in the last shards; `store.dram` and the disk are planned for less."""
    rule = mask_rule("rigl", "magnitude")
    (ours, theirs) = loaded(make("rigl", 4, rule=rule), in_memory("rigl", rule=rule), last=50.0)
    parts = [shard.mask("1.weight").kept for shard in ours.shards]
    plans = [shard.program.weights["1.weight"].capacity for shard in ours.shards]
    rooms = [shard._layout.unit("1.weight").capacity for shard in ours.shards]
    assert any(kept > plan for kept, plan in zip(parts, plans, strict=True))
    assert rooms == [8192] * 4  # of 40,960 elements in granules, 8,192 entries
    assert_same_steps(ours, theirs)
    for shard in ours.shards:
        extents = shard.folder / "extents"
        assert extents.stat().st_size == shard._layout.file_bytes > shard.flash_bytes


def test_part_of_a_mask_may_keep_nothing(make):
    """At first the entries of `2.weight` are all in the first shard; then they grow everywhere."""
    rule = mask_rule("rigl", "zeros")
    stores = (
        make("rigl", 3, rule=rule, optimizer=EIGHT_BIT),
        in_memory("rigl", rule=rule, optimizer=EIGHT_BIT),
    )
    weights = random_weights(stores[0].program, 1)
    for name in SPARSE:
        flat = weights[name].view(-1)
        flat[int(DENSITY * flat.numel()) :] = 0
    for store in stores:
        store.load(weights.items())
    ours, theirs = stores
    assert 0 in [shard.mask("2.weight").kept for shard in ours.shards]
    ours.make_durable()
    assert_same_steps(ours, theirs, 2)
    ours.make_durable()
    ours.close()
    ours = make("rigl", 3, rule=rule, optimizer=EIGHT_BIT)
    assert all(shard.mask("2.weight").kept for shard in ours.shards)
    assert_same_steps(ours, theirs, 3)


def test_shard_without_sparse_weights_counts_the_updates(make):
    """RigL changes masks in place of the update, in shards without masks too."""
    layers = ({"1.small": (40, 50), "wide": (70, 300)}, {"bias": (30,), "other": (64, 64)})
    program = sparse_program("rigl", layers=layers, sparse=("1.small",))
    rule = MaskRule(mask_rule("rigl").policy, 3, "random", {"1.small": DENSITY})
    ours = make("rigl", 2, program=program, rule=rule)
    assert sorted("1.small" in shard.program.weights for shard in ours.shards) == [False, True]
    theirs = in_memory("rigl", program=program, rule=rule)
    loaded(ours, theirs)
    for _ in range(4):
        step(ours, 5)
        step(theirs, 5)
        ours.make_durable()
        ours.close()
        ours = make("rigl", 2, program=program, rule=rule)
    assert theirs._masks.updates < theirs.step
    assert_same_steps(ours, theirs, 2)


def test_one_shard_in_the_files_of_a_store_without_shards(make, tmp_path):
    program, rule = sparse_program("rigl"), mask_rule("rigl")
    ours, theirs = loaded(make("rigl", 1, single=True), in_memory("rigl"))
    assert_same_steps(ours, theirs, 4)
    ours.make_durable()
    ours.close()
    plain = {"clip_norm": CLIP, "masks": rule, "dram_bytes": DRAM}
    undivided = flash_store(program, tmp_path / "flash", **plain)
    try:
        assert_same_steps(undivided, theirs, 2)
        undivided.make_durable()
    finally:
        undivided.close()
    assert_same_steps(make("rigl", 1, single=True), theirs, 2)


@pytest.mark.usefixtures("speculated")
def test_discarded_step_and_gradients_that_are_not_finite_change_nothing(make):
    ours, theirs = loaded(make("rigl", 3), in_memory("rigl"))
    step(ours, 5)
    step(theirs, 5)
    with np.errstate(invalid="ignore"), pytest.raises(NonFiniteError, match="NaN or infinity"):
        step(ours, 5, scale=np.inf)
    assert_same_steps(ours, theirs, 3)


def copied(source, target):
    """Copy a shard as a learner does, which knows the portions bit by bit."""
    target.begin_restore()
    portions, there = source.portions(3_000), target.portions(3_000)
    number = 0
    while number < len(there.sizes):
        there.write(number, np.array(portions.read(number)))
        number += 1
    assert number == len(portions.sizes)
    assert max(portions.sizes) <= 3_000
    assert target.portions(3_000).checksum() == source.portions(3_000).checksum()
    target.finish_restore(source.step)


@pytest.mark.long
@pytest.mark.parametrize("initial", ["random", "zeros"])
@pytest.mark.usefixtures("speculated")
def test_copied_shards_continue_with_the_same_bits(initial, make, tmp_path):
    rule = mask_rule("rigl", initial)
    more = {"optimizer": EIGHT_BIT, "rule": rule}
    ours, theirs = make("rigl", 3, **more), in_memory("rigl", **more)
    weights = random_weights(ours.program, 1)
    if initial == "zeros":
        for name in SPARSE:
            flat = weights[name].view(-1)
            flat[int(DENSITY * flat.numel()) :] = 0
    for store in (ours, theirs):
        store.load(weights.items())
        step(store, 5)
    settings = {"clip_norm": CLIP, "masks": rule, "optimizer": EIGHT_BIT, "dram_bytes": DRAM}
    others = []
    for number, shard in enumerate(list(ours.shards)):
        folder = tmp_path / "copies" / f"shard-{number}"
        other = flash_store(shard.program, folder, **settings)
        copied(shard, other)
        assert other.compared() == shard.compared()
        other.close()
        others.append(flash_store(shard.program, folder, **settings))
        assert others[-1].step == 1
        ours.shards[number] = others[-1]
    assert_same_steps(ours, theirs, 4)
    for other in others:
        other.close()


def test_replicas_with_another_mask_or_value_differ(make):
    (ours,) = loaded(make("set", 2))
    step(ours, 5)
    ours.flush()
    shard = ours.shards[0]
    before = shard.compared()
    shard.mask("2.weight").codes[10] ^= 1
    shard._content._mask_checks.clear()
    assert [a for a, b in zip(before, shard.compared(), strict=True) if a != b] == [
        pair for pair in before if pair[0] == "the masks of sparse weights"
    ]


def test_table_of_other_masks_is_refused(make):
    (ours,) = loaded(make("set", 2))
    shard = ours.shards[0]
    shard.begin_restore()
    for data in (b"", b"{}", b'{"history": [0, []], "masks": [[1, 2]]}', b"[" * 9999):
        with pytest.raises(CorruptionError, match="portion 0: expected a table of masks, got inv"):
            shard.portions(3_000).write(0, np.frombuffer(data, np.uint8))


def test_copied_history_that_no_step_can_have_is_refused(make, tmp_path):
    (ours,) = loaded(make("set", 2))
    for _ in range(2):
        step(ours, 5)
    ours.flush()
    shard = ours.shards[0]
    other = flash_store(
        shard.program,
        tmp_path / "other",
        clip_norm=CLIP,
        masks=mask_rule("set"),
        dram_bytes=DRAM,
    )
    other.begin_restore()
    portions, there = shard.portions(3_000), other.portions(3_000)
    table = json.loads(np.array(portions.read(0)).tobytes())
    table["history"][0] = shard.step + 5
    there.write(0, np.frombuffer(json.dumps(table).encode(), np.uint8))
    number = 1
    while number < len(there.sizes):
        there.write(number, np.array(portions.read(number)))
        number += 1
    with pytest.raises(CorruptionError, match=f"not one of step {shard.step}: expected rising"):
        other.finish_restore(shard.step)
    other.close()


def test_frames_of_parts_that_are_planned_for_less_are_not_page_locked(make, monkeypatch):
    ours = make("set", 8)
    units = [unit for shard in ours.shards for unit in shard._content._layout.units]
    locked = []
    monkeypatch.setattr("penstock.store.flash.frames.page_lock", lambda m: locked.append(m.nbytes))
    planned = next(unit for unit in units if unit.planned)
    dense = next(unit for unit in units if not unit.planned)
    frames = Frames([planned, dense], [Visit(0, (0, 1))], 1 << 40)
    frames.page_locked = True
    for number in range(2):
        assert frames.make_room(number, (), ahead=False)
    assert locked == [dense.stream_bytes]


def test_checkpoint_goes_to_shards_on_flash_and_back(make, tmp_path):
    ours, theirs = loaded(
        make("rigl", 3, optimizer=EIGHT_BIT), in_memory("rigl", optimizer=EIGHT_BIT)
    )
    for store in (ours, theirs):
        for _ in range(4):
            step(store, 5)
    saved = save_checkpoint(ours, tmp_path / "saved", {})
    other, one = (
        make("rigl", 2, folder="two", optimizer=EIGHT_BIT),
        in_memory("rigl", optimizer=EIGHT_BIT),
    )
    load_checkpoint(other, saved.folder)
    load_checkpoint(one, saved.folder)
    assert other.durable_step == 4
    other.close()
    other = make("rigl", 2, folder="two", optimizer=EIGHT_BIT)
    assert_same_sparse_state(one, theirs)
    assert_same_steps(other, theirs, 4)


def test_reader_shows_masks_values_and_hash_of_all_shards(make, tmp_path):
    (ours,) = loaded(make("rigl", 3, torch.bfloat16))
    for _ in range(3):
        step(ours, 5)
    ours.make_durable()
    masters = {name: ours.master(name).reshape(-1).numpy() for name in ours.program.weights}
    masks, found = {name: ours.mask(name) for name in SPARSE}, ours.content_hash()
    ours.close()
    with open_reader(tmp_path / "flash") as reader:
        reader.verify(3)
        assert reader.content_hash(3) == found
        assert reader.sparse == {name: ours.program.weights[name].shape for name in SPARSE}
        assert reader.kept == {name: mask.kept for name, mask in masks.items()}
        for name, values in masters.items():
            begin, end = values.size // 3, values.size - values.size // 4
            inside = reader.read(name, MASTER, begin, end)
            np.testing.assert_array_equal(inside, values[begin:end])
        for name, mask in masks.items():
            assert reader.mask(name).same_mask(mask)
        assert reader.mask("embed") is None


def test_damaged_mask_of_one_shard_rolls_all_back_before_its_change(make, tmp_path):
    (ours,) = loaded(make("set", 2))
    hashes = []
    for _ in range(3):  # the third changes the masks
        hashes.append(ours.content_hash())
        step(ours, 5)
        ours.make_durable()
    shard = ours.shards[1]
    unit = shard._layout.unit("1.weight")
    stored = shard._version.masks._masks[unit.index]
    place = unit.mask_offset(stored.place) + stored.size - 1
    ours.close()
    with (shard.folder / "extents").open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 8]))
    named = r"shard-1/extents: damaged in bytes .*, which hold the mask of 1\.weight: expected"
    with pytest.raises(CorruptionError, match=named):
        make("set", 2)
    with open_reader(tmp_path / "flash") as reader, pytest.raises(CorruptionError, match=named):
        reader.verify(3)
    assert repair(tmp_path / "flash") == Repaired(2, (3,), damaged_journal=False)
    ours = make("set", 2)
    assert ours.content_hash() == hashes[2]
    (theirs,) = loaded(in_memory("set"))
    for _ in range(2):
        step(theirs, 5)
    assert_same_steps(ours, theirs, 3)


def test_dense_gradients_are_not_held(make):
    """Of a dense gradient, a shard keeps the entries that may be grown."""
    (ours,) = loaded(make("rigl", 2))
    assert isinstance(mask_rule("rigl").policy, RigL)
    for shard in ours.shards:
        assert shard.memory_bytes["grown entries"] < sum(
            4 * shard.program.weights[name].elements
            for name in SPARSE
            if name in shard.program.weights
        )
