"""Files of a store in shards that somebody has changed, or made up: refused by name."""

import json
import os
import shutil

import pytest
from sharded_stores import sharded_flash
from store_programs import make_program, random_weights

from penstock.errors import ConfigError, CorruptionError, StorageError
from penstock.store import sealed_json
from penstock.store.flash import discard_untrained, open_reader, recorded_extra
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


def test_every_flipped_bit_of_the_description_is_found(folder):
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
        {"weights": ["a"]},
        {"weights": {"a": 5}},
        {"weights": {"a": [-1]}},
        {"weights": {"a": [2.5]}},
        {"weights": {"a": [1] * 65}},
    ],
)
def test_numbers_that_cannot_be(folder, changes):
    resealed(folder, **changes)
    refused(folder, CorruptionError, r"shards\.json: it does not describe shards")


def test_a_newer_format(folder):
    resealed(folder, version=2)
    refused(folder, ConfigError, r"shards\.json: its format has version 2, this Penstock reads 1")


@pytest.mark.parametrize(
    "weights",
    [{"a": [3, 4096]}, {"a": [3 * 4096, 2]}, {"a": [3 * 4096, 2], "b": [5], "c": [7]}],
)
def test_pieces_that_do_not_make_up_the_weights(folder, weights):
    resealed(folder, weights=weights)
    with pytest.raises(CorruptionError, match=r"the shards' pieces do not make up '[abc]'"):
        open_reader(folder)


def test_a_shard_that_is_gone(folder):
    shutil.rmtree(folder / "shard-1")
    with pytest.raises(ConfigError, match="shard-1: no store on flash here yet"):
        open_reader(folder)
    store = sharded_flash(PROGRAM, folder, 2)  # only the first weights: they are loaded again
    assert store.is_new
    store.load(random_weights(PROGRAM, 0).items())
    store.close()


def test_what_is_no_plain_file(folder):
    (folder / SHARDS).unlink()
    os.mkfifo(folder / SHARDS)
    with pytest.raises(CorruptionError, match=r"shards\.json: "):
        open_reader(folder)


def test_a_link_in_the_place_of_a_shard_is_not_followed(folder, tmp_path):
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
