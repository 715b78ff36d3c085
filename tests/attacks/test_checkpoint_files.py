"""Hostile checkpoints: refused by name, and neither read from nor written to any other place.

`state.json` and `index.json` are sealed again after each change, as somebody would who means harm.
"""

import json
import math
import os
import shutil

import pytest
from bounded_memory import bounded_memory
from store_programs import make_program, random_weights, train, training_store

from penstock.errors import ConfigError, CorruptionError, StorageError
from penstock.store import (
    SavedWeights,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    sealed_json,
    verify_checkpoint,
)

# To hang is to fail; fixtures may compile kernels first.
pytestmark = pytest.mark.timeout(30, func_only=True)

LAYERS = ({"a": (40, 3), "frozen": (7,)}, {"b": (5, 5)})
FILE = "stage-00000.safetensors"


@pytest.fixture(autouse=True)
def _little_memory():
    with bounded_memory():
        yield


def fresh_store():
    return training_store(make_program(LAYERS, frozen=("frozen",)))


def saved(checkpoints, steps):
    store = fresh_store()
    store.load(random_weights(store.program, 1).items())
    for _ in range(steps):
        train(store, 1, 1)
        save_checkpoint(store, checkpoints, {"note": "mine"})
    return store


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    saved(folder / "checkpoints", 2)
    return folder / "checkpoints"


@pytest.fixture
def checkpoints(original, tmp_path):
    """A copy of two checkpoints."""
    return shutil.copytree(original, tmp_path / "checkpoints", symlinks=True)


@pytest.fixture
def folder(checkpoints):
    return checkpoints / "step-00000002"


def resealed(path, change):
    """Seal other content; what `change` returns, or what it made of what it was given."""
    content = json.loads(path.read_bytes())["content"]
    path.write_bytes(sealed_json.seal(change(content) or content))


def read_all(saved):
    for name, shape in saved.shapes.items():
        saved.read(name, "master", 0, math.prod(shape))


def refuse_all(folder, match, kind=CorruptionError):
    for look in (
        lambda: load_checkpoint(fresh_store(), folder),
        lambda: verify_checkpoint(folder),
        lambda: read_all(SavedWeights(folder)),
    ):
        with pytest.raises(kind, match=match):
            look()


def tensor_change(position, value):
    def change(content):
        content["tensors"]["master/a"][position] = value

    return change


ENTRIES = {
    "2^60 elements": (2, [2**60]),
    "sizes whose product wraps": (2, [2**32, 2**32]),
    "zero elements of an endless shape": (2, [0, 2**62, 2**62]),
    "a negative size": (2, [-40, -3]),
    "a size that is true": (2, [120, True]),
    "a size that is a fraction": (2, [120.0]),
    "a hundred thousand dimensions": (2, [2**62] * 100_000),
    "a negative begin": (3, -8),
    "a begin of 2^60": (3, 2**60),
    "a begin of 4,000 digits": (3, 10**4000),
    "an end of 2^63": (4, 2**63),
    "an end behind the file": (4, 10**6),
    "an unknown type": (1, "F128"),
    "a file above": (0, "../../../etc/passwd"),
    "an absolute file": (0, "/etc/passwd"),
    "a file that is not there": (0, "stage-99999.safetensors"),
}


@pytest.mark.parametrize("what", ENTRIES)
def test_invalid_tensor_is_refused(folder, what):
    resealed(folder / "state.json", tensor_change(*ENTRIES[what]))
    refuse_all(folder, r"state\.json: tensor 'master/a' (is described by|is in the unknown file)")


def test_overlapping_tensors_are_refused(folder):
    def overlap(content):
        first = content["tensors"]["exp_avg/a"]
        content["tensors"]["master/a"][3:] = first[3:]

    resealed(folder / "state.json", overlap)
    refuse_all(folder, "its header differs from the header that state.json describes")


def test_an_empty_tensor_in_an_empty_file(folder):
    """Its file is never read, so nothing but the description stands for it."""

    def empty(content):
        content["files"]["nothing"] = {"bytes": 0, "checksums": []}
        content["tensors"]["master/a"] = ["nothing", "F32", [0, 2**62], 0, 0]

    resealed(folder / "state.json", empty)
    os.mkfifo(folder / "nothing")
    kinds = (CorruptionError, ConfigError)
    refuse_all(folder, "nothing: |another model|its header differs", kinds)


@pytest.mark.parametrize(
    "name",
    ["../step-00000001/" + FILE, "/etc/passwd", "..", ".", "", "a/b", "a\0b", "a/../" + FILE],
)
def test_file_name_outside_folder_is_refused(folder, name):
    def move(content):
        content["files"][name] = content["files"].pop(FILE)
        for place in content["tensors"].values():
            place[0] = name if place[0] == FILE else place[0]

    resealed(folder / "state.json", move)
    refuse_all(folder, r"state\.json: file .* is described by")


@pytest.mark.parametrize(
    "record",
    [
        {"bytes": -1, "checksums": []},
        {"bytes": 2**60, "checksums": ["0" * 32]},
        {"bytes": 10**4000, "checksums": []},
        {"bytes": True, "checksums": ["0" * 32]},
        {"bytes": 100, "checksums": []},
        {"bytes": 100, "checksums": [5]},
        {"bytes": 100},
        [],
    ],
    ids=lambda record: str(record)[:40],
)
def test_invalid_file_record_is_refused(folder, record):
    resealed(folder / "state.json", lambda c: c["files"].update({FILE: record}))
    refuse_all(folder, r"state\.json: file 'stage-00000\.safetensors' is described by")


@pytest.mark.parametrize(
    "base",
    [
        5,
        {},
        {"fingerprint": 5, "weights": {}},
        {"fingerprint": "f", "weights": []},
        {"fingerprint": "f", "weights": {"b": []}},
        {"fingerprint": "f", "weights": {"b": ["F128", [3], "0"]}},
        {"fingerprint": "f", "weights": {"b": ["F32", [-3], "0"]}},
        {"fingerprint": "f", "weights": {"b": ["F32", [True], "0"]}},
        {"fingerprint": "f", "weights": {"b": ["F32", [10**4000], "0"]}},
        {"fingerprint": "f", "weights": {"b": ["F32", 3, "0"]}},
        {"fingerprint": "f", "weights": {"b": ["F32", [3], 0]}},
        {"fingerprint": "f", "weights": {"a": ["F32", [3], "0"]}},
    ],
    ids=lambda base: str(base)[:60],
)
def test_invalid_base_is_refused(folder, base):
    resealed(folder / "state.json", lambda c: c.update(base=base))
    refuse_all(folder, r"state\.json: (its base|weight '[ab]' (of its base )?is )")


@pytest.mark.parametrize("step", [-1, 2**63, 10**4000, True, "2", 2.0, None])
def test_invalid_step_is_refused(folder, step):
    resealed(folder / "state.json", lambda c: c.update(step=step))
    refuse_all(folder, r"state\.json: it does not describe a checkpoint")


@pytest.mark.parametrize("version", [4, 2**63, 10**4000])
def test_unknown_format_version_is_refused(folder, version):
    resealed(folder / "state.json", lambda c: c.update(version=version))
    refuse_all(folder, "by a newer penstock; .*update penstock", ConfigError)


@pytest.mark.parametrize("depth", [100, 400, 490, 900, 990, 1_000, 3_000, 100_000])
def test_deeply_nested_json_is_refused(folder, depth):
    """Reading and taking the checksum give up at different depths; neither may show."""
    path = folder / "state.json"
    deep = "[" * depth + "]" * depth
    path.write_text(f'{{"checksum": "{"0" * 32}", "content": {{"a": {deep}}}}}')
    refuse_all(folder, r"state\.json: (expected checksum|it is not JSON)")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "9" * 5000, "1e999"])
def test_numbers_outside_json_are_refused(folder, value):
    path = folder / "state.json"
    path.write_text(path.read_text().replace('"step": 2', f'"step": {value}'))
    refuse_all(folder, r"state\.json: ")


@pytest.mark.parametrize("name", ["\ud800", "a\udfff"])
def test_name_that_is_not_text_is_refused(folder, name):
    """It could be neither a file's, nor shown, nor hashed."""
    resealed(folder / "state.json", lambda c: c["tensors"].update({name: c["tensors"]["master/a"]}))
    refuse_all(folder, r"state\.json: it is not JSON: .*surrogates not allowed")
    resealed(folder / "state.json", lambda c: c["tensors"].__delitem__(name))
    resealed(folder / "state.json", lambda c: c["files"].update({name: c["files"].pop(FILE)}))
    refuse_all(folder, r"state\.json: it is not JSON: .*surrogates not allowed")


def test_duplicate_key_is_covered_by_the_checksum(folder):
    """The later one counts, for the checksum too: what opens is what was sealed."""
    path = folder / "state.json"
    first = path.read_text()
    path.write_text(first.replace('"step": 2', '"step": 7, "step": 2'))
    assert verify_checkpoint(folder).step == 2
    path.write_text(first.replace('"step": 2', '"step": 2, "step": 7'))
    refuse_all(folder, "expected checksum .* of its content")


# The index


@pytest.mark.parametrize(
    "change",
    [
        {"folders": ["../checkpoints/step-00000002"]},
        {"folders": ["/etc"]},
        {"folders": ["step-00000002\0"]},
        {"folders": ["step-00000002\n"]},
        {"folders": ["step-٠٠٠٠٠٠٠٢"]},
        {"folders": [2]},
        {"folders": "step-00000002"},
        {"best": "step-00000009"},
        {"best": ["step-00000002"]},
        {"retired": ["../.."]},
        {"retired": ["step-00000002"]},
        {"folders": ["step-00000001", "step-00000001"]},
        {"version": 2},
    ],
    ids=lambda change: ascii(change)[:50],
)
def test_invalid_index_is_refused(checkpoints, change):
    resealed(checkpoints / "index.json", lambda c: c.update(change))
    with pytest.raises((CorruptionError, ConfigError), match=r"index\.json: "):
        find_checkpoint(checkpoints, "latest")
    store = fresh_store()
    store.load(random_weights(store.program, 1).items())
    with pytest.raises((CorruptionError, ConfigError), match=r"index\.json: "):
        save_checkpoint(store, checkpoints, {})
    assert {p.name for p in checkpoints.iterdir()} == {
        "index.json",
        "step-00000001",
        "step-00000002",
    }


# Links, and other things than files


def test_removing_a_linked_checkpoint_keeps_its_target(checkpoints, tmp_path):
    outside = tmp_path / "outside"
    shutil.move(checkpoints / "step-00000001", outside)
    (checkpoints / "step-00000001").symlink_to(outside)
    before = sorted(path.name for path in outside.iterdir())
    assert verify_checkpoint(checkpoints / "step-00000001").step == 1
    store = fresh_store()
    load_checkpoint(store, find_checkpoint(checkpoints, "latest"))
    train(store, 1, 1)
    save_checkpoint(store, checkpoints, {})
    assert not os.path.lexists(checkpoints / "step-00000001")
    assert sorted(path.name for path in outside.iterdir()) == before


@pytest.mark.parametrize("name", [".tmp-index.json", ".tmp-step-00000003", "step-00000003"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_where_a_checkpoint_will_be_written_is_replaced(
    checkpoints, tmp_path, name, dangling
):
    outside = tmp_path / "outside"
    if not dangling:
        outside.mkdir()
        (outside / "precious").write_text("mine")
    (checkpoints / name).symlink_to(outside)
    store = fresh_store()
    load_checkpoint(store, find_checkpoint(checkpoints, "latest"))
    train(store, 1, 1)
    assert save_checkpoint(store, checkpoints, {}).folder.name == "step-00000003"
    assert not (checkpoints / "step-00000003").is_symlink()
    assert verify_checkpoint(checkpoints / "step-00000003").step == 3
    if dangling:
        assert not outside.exists()
    else:
        assert [path.name for path in outside.iterdir()] == ["precious"]


@pytest.mark.parametrize("name", [FILE, "state.json"])
def test_linked_file_is_read_and_verified(folder, tmp_path, name):
    shutil.move(folder / name, tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert verify_checkpoint(folder).step == 2
    with (tmp_path / name).open("r+b") as file:
        file.seek(200)
        file.write(b"\0\0\0\0")
    refuse_all(folder, name)


def put_fifo(path):
    os.mkfifo(path)


def put_folder(path):
    path.mkdir()


def put_zeros(path):
    path.symlink_to("/dev/zero")


def put_nothing(path):
    path.write_bytes(b"")


def put_a_trillion(path):
    path.touch()
    os.truncate(path, 2**40)


OTHERS = {
    "a FIFO": put_fifo,
    "a folder": put_folder,
    "zeros without end": put_zeros,
    "an empty file": put_nothing,
    "a sparse file of 2^40 bytes": put_a_trillion,
}


@pytest.mark.parametrize("name", [FILE, "state.json"])
@pytest.mark.parametrize("what", OTHERS)
def test_something_else_where_a_file_was_expected(folder, name, what):
    (folder / name).unlink()
    OTHERS[what](folder / name)
    refuse_all(folder, rf"{name}: ")


@pytest.mark.parametrize("what", OTHERS)
def test_something_else_where_the_index_was_expected(checkpoints, what):
    (checkpoints / "index.json").unlink()
    OTHERS[what](checkpoints / "index.json")
    with pytest.raises(CorruptionError, match=r"index\.json: .*delete the file"):
        find_checkpoint(checkpoints, "latest")


def test_files_of_two_checkpoints_are_not_mixed(checkpoints, folder):
    shutil.copy(checkpoints / "step-00000001" / FILE, folder / FILE)
    refuse_all(folder, rf"{FILE}: damaged in bytes 0 to .* expected checksum")


def test_file_in_place_of_checkpoints_folder_is_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    store = fresh_store()
    store.load(random_weights(store.program, 1).items())
    with pytest.raises(StorageError, match="checkpoints: cannot write it: File exists"):
        save_checkpoint(store, tmp_path / "checkpoints", {})
    assert (tmp_path / "checkpoints").read_text() == "mine"
