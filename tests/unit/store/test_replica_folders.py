"""A shard on flash with a replica: two folders, of which either may hold the newest step."""

import shutil
from contextlib import closing

import pytest
from sharded_stores import sharded_flash
from store_programs import LAYERS, flash_store, make_program, random_weights, train

from penstock.errors import CorruptionError
from penstock.store import ShardMap
from penstock.store.flash import (
    OtherStoreError,
    discard_untrained,
    forget,
    open_reader,
    recorded_extra,
)
from penstock.store.flash.shards import agree_on_step, read_shards, recorded_steps, shard_folder

PROGRAM = make_program(LAYERS, frozen=("position",))


def trained(folder, steps=3):
    """Two shards after so many steps, and a replica of the second with the same."""
    with closing(sharded_flash(PROGRAM, folder, 2)) as store:
        store.load(random_weights(PROGRAM, 1).items())
        for _ in range(steps):
            store.remember({"behind": store.step})
            train(store, 1, seed=2)
            store.make_durable()
        found = store.content_hash()
    shutil.copytree(shard_folder(folder, 1), shard_folder(folder, 1, 1))
    return found


def go_on(folder, steps=1):
    """Train without the replica, which stays behind."""
    with closing(sharded_flash(PROGRAM, folder, 2)) as store:
        train(store, steps, seed=2)
        store.make_durable()
        return store.content_hash()


def steps_of(folder):
    return {path.name: [*recorded_steps(path)] for path in sorted(folder.glob("shard-*"))}


def test_equal_replica_folders_are_unchanged(tmp_path):
    trained(tmp_path)
    held = steps_of(tmp_path)
    agree_on_step(read_shards(tmp_path), replicas=2)
    assert steps_of(tmp_path) == held
    assert held["shard-1-replica-1"] == [2, 3]


@pytest.mark.parametrize("damage", ["stale", "empty"])
def test_replica_behind_discards_its_content(tmp_path, damage):
    trained(tmp_path)
    newest = go_on(tmp_path, 2)
    replica = shard_folder(tmp_path, 1, 1)
    if damage == "empty":
        forget(replica)
    agree_on_step(read_shards(tmp_path), replicas=2)
    assert steps_of(tmp_path) == {"shard-0": [4, 5], "shard-1": [4, 5], "shard-1-replica-1": []}
    part = ShardMap.of(PROGRAM, 2).part(PROGRAM, 1)
    with closing(flash_store(part, replica)) as store:
        assert store.is_new  # so that it is given a copy
    with open_reader(tmp_path) as reader:
        assert reader.content_hash(5) == newest


@pytest.mark.parametrize("gone", [False, True])
def test_run_continues_from_a_step_held_only_by_the_replica(tmp_path, gone):
    found = trained(tmp_path)
    first = shard_folder(tmp_path, 1)
    if gone:
        shutil.rmtree(first)
    else:
        forget(first)  # as a learner does that was to be given a copy when the run was killed
    assert recorded_extra(tmp_path)["behind"] == 2
    with open_reader(tmp_path) as reader:
        assert reader.steps == [2, 3]
        assert reader.content_hash(3) == found
    with pytest.raises(
        OtherStoreError, match=r"step 3 of shard 1 is only in shard-1-replica-1; continue training"
    ):
        agree_on_step(read_shards(tmp_path), replicas=1)
    agree_on_step(read_shards(tmp_path), replicas=2)
    assert steps_of(tmp_path)["shard-1-replica-1"] == [2, 3]


def test_replica_ahead_of_other_shards_rolls_back_with_them(tmp_path):
    trained(tmp_path)
    ahead = tmp_path / "ahead"
    shutil.copytree(tmp_path, ahead)
    go_on(ahead)
    shutil.rmtree(shard_folder(tmp_path, 1, 1))
    shutil.copytree(shard_folder(ahead, 1), shard_folder(tmp_path, 1, 1))
    shutil.rmtree(ahead)
    assert steps_of(tmp_path)["shard-1-replica-1"] == [3, 4]
    agree_on_step(read_shards(tmp_path), replicas=2)
    assert steps_of(tmp_path)["shard-1-replica-1"] == [3]


def test_different_replicas_are_reported_and_neither_is_used(tmp_path):
    trained(tmp_path, steps=2)
    other = tmp_path / "other"
    shutil.copytree(tmp_path, other)
    go_on(tmp_path)
    with closing(sharded_flash(PROGRAM, other, 2)) as store:
        train(store, 1, seed=99)  # as if a bit had flipped in the memory of one host
        store.make_durable()
    shutil.rmtree(shard_folder(tmp_path, 1, 1))
    shutil.copytree(shard_folder(other, 1), shard_folder(tmp_path, 1, 1))
    shutil.rmtree(other)
    told = r"shard-1 and shard-1-replica-1 both hold step 3 but differ. .* creates the deleted"
    with pytest.raises(CorruptionError, match=told):
        agree_on_step(read_shards(tmp_path), replicas=2)


def test_a_replica_of_another_store_is_refused(tmp_path):
    trained(tmp_path)
    other = tmp_path / "other"
    trained(other)
    shutil.rmtree(shard_folder(tmp_path, 1, 1))
    shutil.copytree(shard_folder(other, 1), shard_folder(tmp_path, 1, 1))
    with pytest.raises(CorruptionError, match="is a shard of another store than the one"):
        sharded_flash(PROGRAM, tmp_path, 2)


def test_untrained_weights_are_discarded_in_all_folders(tmp_path):
    trained(tmp_path, steps=0)
    discard_untrained(tmp_path)
    assert not list(tmp_path.glob("shard*"))
