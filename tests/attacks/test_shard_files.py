"""Files of a store in shards that somebody has changed, or made up: refused by name."""

import json
import os
import shutil

import pytest
from sharded_stores import sharded_flash
from store_programs import make_program, random_weights, train

from penstock.errors import ConfigError, CorruptionError, StorageError
from penstock.store import sealed_json
from penstock.store.flash import discard_untrained, open_reader, recorded_extra, repair
from penstock.store.flash.journal import Record, read_records, rewrite_journal
from penstock.store.flash.shards import SHARDS

PROGRAM = make_program([{"a": (3 * 4096, 2), "b": (5,)}])


@pytest.fixture
def folder(tmp_path):
    """A store in two shards, with its first weights."""
    store = sharded_flash(PROGRAM, tmp_path / "flash", 2)
    store.load(random_weights(PROGRAM, 0).items())
    store.close()
    return tmp_path / "flash"


def resealed(folder, **changes):
    """Change what `shards.json` says, with a checksum that matches."""
    content = sealed_json.unseal(folder / SHARDS) | changes
    (folder / SHARDS).write_bytes(sealed_json.seal(content))


def refused(folder, error, message):
    for look in (open_reader, lambda where: sharded_flash(PROGRAM, where, 2)):
        with pytest.raises(error, match=message):
            look(folder)


def test_every_flipped_bit_of_description_is_detected(folder):
    whole = (folder / SHARDS).read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        if json.loads(whole) == _parsed(changed):
            continue  # white space
        (folder / SHARDS).write_bytes(changed)
        with pytest.raises(CorruptionError, match=r"shards\.json: "):
            recorded_extra(folder)


def _parsed(data):
    try:
        return json.loads(bytes(data))
    except ValueError:
        return None


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": 0},
        {"shards": 65},
        {"shards": True},
        {"shards": "2"},
        {"shards": 10**30},
        {"format": "penstock-flash"},
        {"id": None},
        {"id": 7},
        {"id": "0" * 31},
        {"id": "../" * 11},
        {"weights": ["a"]},
        {"weights": {"a": 5}},
        {"weights": {"a": [-1]}},
        {"weights": {"a": [2.5]}},
        {"weights": {"a": [1] * 65}},
    ],
)
def test_impossible_numbers_are_refused(folder, changes):
    resealed(folder, **changes)
    refused(folder, CorruptionError, r"shards\.json: expected a description of shards")


def test_newer_format_is_refused(folder):
    resealed(folder, version=3)
    refused(folder, ConfigError, r"shards\.json: its format has version 3, this Penstock reads 2")


def test_shards_of_two_stores_are_not_taken_for_one(folder, tmp_path):
    """Of the same model at the same step: only that they never belonged together tells."""
    other = tmp_path / "other"
    store = sharded_flash(PROGRAM, other, 2)
    store.load(random_weights(PROGRAM, 1).items())
    store.close()
    shutil.rmtree(folder / "shard-1")
    shutil.copytree(other / "shard-1", folder / "shard-1")
    before = {path: path.read_bytes() for path in folder.rglob("journal")}
    message = (
        r"flash/shard-1 is a shard of another store than the one that \S+/flash/shards\.json "
        "describes, though of the same model; restore all shards from one copy"
    )
    refused(folder, CorruptionError, message)
    with pytest.raises(CorruptionError, match=message):
        recorded_extra(folder)
    with pytest.raises(CorruptionError, match=message):
        repair(folder)
    assert {path: path.read_bytes() for path in folder.rglob("journal")} == before
    # Nor is one whose description came from elsewhere.
    shutil.copy(other / SHARDS, folder / SHARDS)
    refused(folder, CorruptionError, "flash/shard-0 is a shard of another store")


def test_store_of_a_release_without_names_opens(folder):
    with open_reader(folder) as reader:
        weights = reader.content_hash(0)
    content = sealed_json.unseal(folder / SHARDS) | {"version": 1}
    del content["id"]
    (folder / SHARDS).write_bytes(sealed_json.seal(content))
    refused(folder, CorruptionError, "flash/shard-0 is a shard of another store")
    for number in range(2):
        journal = folder / f"shard-{number}" / "journal"
        first, *records = read_records(journal)[0]
        old = {key: value for key, value in first.content.items() if key != "store"}
        rewrite_journal(journal, [Record(old, first.blob), *records], "journal.drop")
    with open_reader(folder) as reader:
        assert reader.content_hash(0) == weights
    store = sharded_flash(PROGRAM, folder, 2)
    assert store.content_hash() == weights
    train(store, 2, 0)
    store.make_durable()
    store.close()
    with open_reader(folder) as reader:
        assert reader.newest == 2
    assert sealed_json.unseal(folder / SHARDS) == content


@pytest.mark.parametrize(
    "weights",
    [{"a": [3, 4096]}, {"a": [3 * 4096, 2]}, {"a": [3 * 4096, 2], "b": [5], "c": [7]}],
)
def test_pieces_that_do_not_cover_weights_are_refused(folder, weights):
    resealed(folder, weights=weights)
    with pytest.raises(CorruptionError, match=r"the pieces of the shards do not cover '[abc]'"):
        open_reader(folder)


def test_missing_shard_is_refused(folder):
    shutil.rmtree(folder / "shard-1")
    with pytest.raises(ConfigError, match="shard-1: no store on flash here yet"):
        open_reader(folder)
    store = sharded_flash(PROGRAM, folder, 2)  # only the first weights: they are loaded again
    assert store.is_new
    store.load(random_weights(PROGRAM, 0).items())
    store.close()


def test_special_file_is_refused(folder):
    (folder / SHARDS).unlink()
    os.mkfifo(folder / SHARDS)
    with pytest.raises(CorruptionError, match=r"shards\.json: "):
        open_reader(folder)


def test_symlink_in_place_of_shard_is_not_followed(folder, tmp_path):
    """Where weights that never trained are discarded, nothing outside the folder is."""
    (folder / "shard-0").rename(tmp_path / "elsewhere")
    (folder / "shard-0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        discard_untrained(folder)
    assert (tmp_path / "elsewhere" / "journal").exists()


def test_weights_that_never_trained_are_discarded_whole_even_where_that_was_cut_short(folder):
    shutil.rmtree(folder / "shard-0")
    discard_untrained(folder)
    assert not list(folder.glob("shard*"))
