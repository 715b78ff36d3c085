"""Sparse weights in shards: every number of shards has the bits of one store."""

import numpy as np
import pytest
import torch
from grids import thinned
from sparse_stores import (
    STEPS,
    assert_same_sparse_state,
    assert_same_streams,
    mask_rule,
    policies,
    sharded_sparse,
    sparse_program,
    sparse_store,
    step,
)
from store_programs import random_weights

from penstock.errors import ConfigError, CorruptionError, NonFiniteError
from penstock.store import AdamW, load_checkpoint, save_checkpoint


def both(policy, count, stream_dtype=torch.float32, initial="random", **settings):
    """Return a store without shards and one with, loaded with the same weights."""
    program = sparse_program(policy, stream_dtype)
    rule = mask_rule(policy, initial)
    precision = "bf16" if stream_dtype == torch.bfloat16 else "fp32"
    weights = random_weights(program, 1)
    if initial == "magnitude":  # most entries at the end: the room of the last shards must grow
        for value in weights.values():
            flat = value.view(-1)
            flat *= torch.linspace(0.01, 2, flat.numel())
    whole = sparse_store(program, rule, precision, **settings)
    parts = sharded_sparse(program, count, rule, precision, **settings)
    for store in (whole, parts):
        store.load(weights.items())
    return whole, parts


def assert_same_steps(whole, parts, steps=STEPS):
    for _ in range(steps):
        (one, streamed), (other, also) = step(whole, 5), step(parts, 5)
        assert one == other
        assert_same_streams(also, streamed)
    assert_same_sparse_state(parts, whole)


@pytest.mark.parametrize(
    ("policy", "count"), thinned(list(policies()), [1, 2, 5, 8], others=pytest.mark.long)
)
def test_shards_have_the_bits_of_one_store(policy, count):
    whole, parts = both(policy, count, clip_norm=1.0)
    assert_same_sparse_state(parts, whole)
    assert_same_steps(whole, parts)
    changed = whole.read("2.weight", "mask_changes", 0, 9).size - 1
    assert changed == {"static": 0, "densify": 3}.get(policy, changed)
    assert (changed > 0) == (policy != "static")


@pytest.mark.parametrize(
    ("policy", "moments"),
    thinned(["gmp", "rigl", "densify"], ["fp32", "8bit"], others=pytest.mark.long),
)
def test_shards_in_bfloat16_have_the_bits_of_one_store(policy, moments):
    optimizer = AdamW(0.9, 0.95, 1e-8, moments=moments)
    whole, parts = both(
        policy, 3, torch.bfloat16, optimizer=optimizer, gradient_dtype=torch.bfloat16
    )
    assert_same_steps(whole, parts)


@pytest.mark.parametrize("policy", ["set", "rigl"])
def test_8bit_moments_of_shards_have_the_bits_of_one_store(policy):
    whole, parts = both(policy, 4, optimizer=AdamW(0.9, 0.95, 1e-8, moments="8bit"))
    assert_same_steps(whole, parts)


def test_room_of_a_shard_grows_with_its_part_of_the_mask():
    whole, parts = both("rigl", 4, initial="magnitude", clip_norm=1.0)
    planned = sharded_sparse(parts.program, 4, mask_rule("rigl")).memory_bytes
    assert_same_steps(whole, parts)
    grown = parts.memory_bytes
    assert grown["master"] > planned["master"]
    assert grown["gradient"] > planned["gradient"]


@pytest.mark.parametrize("policy", ["rigl", "set"])
def test_replayed_step_with_a_mask_change_has_the_same_bits(policy):
    whole, parts = both(policy, 3)
    for _ in range(STEPS):
        step(whole, 5)
        parts.discard()
        for stage in reversed(parts.program.stages[1:]):  # the step fails before its last gradients
            views = parts.fetch(stage.index)
            sent = [
                torch.ones(
                    view.shape if getattr(view, "dense_gradient", True) else len(view.values)
                )
                for view in views
            ]
            parts.receive(stage.index, sent)
        step(parts, 5)
    assert_same_sparse_state(parts, whole)


def test_dense_gradient_that_is_not_finite_commits_nothing():
    whole, parts = both("rigl", 3)
    with np.errstate(invalid="ignore"):
        for store in (whole, parts):
            with pytest.raises(NonFiniteError, match="NaN or infinity in the gradient"):
                step(store, 5, scale=np.inf)
    assert_same_steps(whole, parts)


def test_checkpoint_moves_between_any_numbers_of_shards(tmp_path):
    whole, parts = both("rigl", 3)
    for store in (whole, parts):
        for _ in range(4):
            step(store, 5)
    saved = save_checkpoint(parts, tmp_path / "shards", {}, keep_last=1)
    save_checkpoint(whole, tmp_path / "whole", {}, keep_last=1)
    program, rule = parts.program, mask_rule("rigl")
    one, five = sparse_store(program, rule), sharded_sparse(program, 5, rule)
    load_checkpoint(one, saved.folder)
    load_checkpoint(five, next((tmp_path / "whole").glob("step-*")))
    assert_same_steps(one, five)
    while whole.step < one.step:
        step(whole, 5)
    assert_same_sparse_state(five, whole)


def test_snapshot_of_shards_is_read_while_masks_change(tmp_path):
    whole, parts = both("rigl", 3)
    step(whole, 5)
    step(parts, 5)
    before = {
        (name, role): whole.read(name, role, 0, int(np.prod(stored.shape))).copy()
        for name in whole.program.weights
        for role, stored in whole.roles(name).items()
    }
    snapshot = parts.snapshot(1 << 30)
    for _ in range(3):
        step(parts, 5)
    assert parts.mask("2.weight").to_bytes() != whole.mask("2.weight").to_bytes()
    for (name, role), values in before.items():
        assert snapshot.roles(name)[role].shape == whole.roles(name)[role].shape
        read = [piece.copy() for piece in snapshot.pieces(name, role, 1000)]
        assert np.concatenate(read).tobytes() == values.tobytes(), (name, role)


def test_mask_with_more_entries_than_the_weight_has_room_for_is_refused():
    program = sparse_program("static")
    parts = sharded_sparse(program, 2, mask_rule("gmp"))
    with pytest.raises(ConfigError, match=r"the mask of 0.weight has 27300 entries, its capacity"):
        parts.load(random_weights(program, 1).items())


def copied(source, target, portion_bytes):
    """Copy a shard as a learner does, which knows the portions once it has the first."""
    target.begin_restore()
    portions, there = source.portions(portion_bytes), target.portions(portion_bytes)
    number = 0
    while number < len(there.sizes):
        there.write(number, np.array(portions.read(number)))
        number += 1
    assert number == len(portions.sizes)
    assert max(portions.sizes[1:]) <= portion_bytes
    assert target.portions(portion_bytes).checksum() == source.portions(portion_bytes).checksum()
    target.finish_restore(source.step)
    return target


@pytest.mark.parametrize("stream_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("initial", ["random", "magnitude"])
def test_copied_shards_continue_with_the_same_bits(stream_dtype, initial):
    settings = {"optimizer": AdamW(0.9, 0.95, 1e-8, moments="8bit"), "clip_norm": 1.0}
    whole, parts = both("rigl", 4, stream_dtype, initial, **settings)
    for store in (whole, parts):
        for _ in range(4):
            step(store, 5)
    precision = "bf16" if stream_dtype == torch.bfloat16 else "fp32"
    before = list(parts.shards)
    for number, shard in enumerate(before):
        empty = sparse_store(shard.program, mask_rule("rigl"), precision, **settings)
        parts.shards[number] = copied(shard, empty, 5_000)
        assert empty.compared() == shard.compared()
    assert_same_steps(whole, parts)


def test_a_changed_bit_of_a_mask_or_an_entry_is_seen_in_a_comparison():
    _, parts = both("set", 2)
    step(parts, 5)
    shard = parts.shards[0]
    shard.flush()
    (entries,) = shard._memory.masters.weight("2.weight")
    for array in (entries.view(np.uint8), shard.mask("2.weight").codes):
        before = [shard._memory.rotation(None).part(n) for n in range(200)]
        array[100] ^= 1
        after = [shard._memory.rotation(None).part(n) for n in range(200)]
        array[100] ^= 1
        assert before != after


def test_table_of_other_arrays_is_refused():
    _, parts = both("set", 2)
    target = sparse_store(parts.shards[0].program, mask_rule("set"))
    target.begin_restore()
    portions = target.portions(5_000)
    for data in (b"", b"{}", b'{"updates": 0, "arrays": [["2.weight", "values", "float64", 3]]}'):
        with pytest.raises(CorruptionError, match="expected a table of arrays"):
            portions.write(0, np.frombuffer(data, np.uint8))
    other = b'{"updates": 0, "arrays": [["other", "values", "float32", 3]]}'
    with pytest.raises(CorruptionError, match="got 'values' of 'other'"):
        portions.write(0, np.frombuffer(other, np.uint8))
