"""Any file of a checkpoint opens to what was written, or is refused by an error of ours."""

import contextlib
import json
import math
import struct

import pytest
import safetensors
import xxhash
from hypothesis import strategies as st
from mutations import mutated, mutated_json
from searching import EXAMPLES, search
from store_programs import make_program, random_weights, train, training_store

from penstock.errors import ConfigError, CorruptionError, StorageError
from penstock.io.safetensors_header import header_length, parse_header
from penstock.store import (
    SavedWeights,
    find_checkpoint,
    load_checkpoint,
    read_state,
    save_checkpoint,
    sealed_json,
    verify_checkpoint,
)

LAYERS = ({"a": (4, 3), "frozen": (7,)}, {"b": (5, 5)})
FILE = "stage-00000.safetensors"
REFUSALS = (ConfigError, CorruptionError, StorageError)


def fresh_store():
    return training_store(make_program(LAYERS, frozen=("frozen",)))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two checkpoints; the tests write into their files and put them back."""
    folder = tmp_path_factory.mktemp("fuzz")
    store = fresh_store()
    store.load(random_weights(store.program, 1).items())
    for _ in range(2):
        train(store, 1, 1)
        save_checkpoint(store, folder, {"note": "mine", "loss": 1.5})
    return folder


@pytest.fixture
def put_back(checkpoints):
    before = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
    yield
    for path, content in before.items():
        path.write_bytes(content)


@pytest.fixture
def folder(checkpoints, put_back):
    return checkpoints / "step-00000002"


@EXAMPLES
def test_changed_state_is_equal_or_refused(folder, examples):
    path, valid = folder / "state.json", read_state(folder)

    def holds(data):
        path.write_bytes(data)
        with contextlib.suppress(*REFUSALS):
            assert read_state(folder) == valid

    search(mutated(path.read_bytes()), holds, examples)


@EXAMPLES
def test_resealed_state_is_verified_or_refused(folder, examples):
    path = folder / "state.json"
    hashes = weights_of(folder)

    def holds(content):
        path.write_bytes(sealed_json.seal(content))
        with contextlib.suppress(*REFUSALS):
            assert verify_checkpoint(folder) == read_state(folder)
        with contextlib.suppress(*REFUSALS):
            # Names may have been changed for others; no weight has become another.
            assert set(weights_of(folder).values()) <= set(hashes.values())
        with contextlib.suppress(*REFUSALS):
            load_checkpoint(fresh_store(), folder)

    content = json.loads(path.read_bytes())["content"]
    search(mutated_json(content).filter(lambda c: isinstance(c, dict)), holds, examples)


def weights_of(folder):
    saved = SavedWeights(folder)
    return {
        name: xxhash.xxh3_64_hexdigest(saved.read(name, "master", 0, math.prod(shape)).tobytes())
        for name, shape in saved.shapes.items()
    }


@EXAMPLES
def test_any_bytes_are_no_state(folder, examples):
    def holds(data):
        (folder / "state.json").write_bytes(data)
        with pytest.raises(CorruptionError):
            read_state(folder)

    json_like = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
        max_leaves=20,
    )
    sealed = st.dictionaries(st.text(max_size=9), json_like, max_size=4).map(sealed_json.seal)
    text = json_like.map(lambda value: json.dumps(value).encode())
    search(st.binary(max_size=300) | text | sealed, holds, examples)


@EXAMPLES
@pytest.mark.parametrize("again", [False, True], ids=["as it is", "sealed again"])
def test_changed_index_names_folders_of_this_run_or_is_refused(
    checkpoints, put_back, again, examples
):
    path = checkpoints / "index.json"
    content = json.loads(path.read_bytes())["content"]
    latest = find_checkpoint(checkpoints, "latest")

    def holds(found):
        path.write_bytes(sealed_json.seal(found) if again else found)
        for which in ("latest", "best", 1):
            with contextlib.suppress(*REFUSALS):
                folder = find_checkpoint(checkpoints, which)
                if folder is not None:
                    assert folder.parent == checkpoints
                    assert folder.name.startswith("step-")
                if not again and which == "latest":
                    assert folder == latest

    changed = mutated_json(content).filter(lambda c: isinstance(c, dict))
    search(changed if again else mutated(path.read_bytes()), holds, examples)


@EXAMPLES
def test_headers_are_read_as_by_the_safetensors_library(folder, examples):
    """Header and data changed anywhere, with no checksum in the way."""
    path = folder / FILE
    valid = path.read_bytes()

    def holds(data):
        try:
            length = header_length(path, data[:8], len(data))
            found = parse_header(path, data[:length], len(data))
        except CorruptionError:
            return
        theirs = dict(safetensors.deserialize(data))
        assert found.keys() == theirs.keys()
        for name, extent in found.items():
            assert theirs[name]["dtype"] == extent.dtype
            assert tuple(theirs[name]["shape"]) == extent.shape
            assert bytes(theirs[name]["data"]) == data[extent.begin : extent.end]

    table = json.loads(valid[8 : 8 + struct.unpack("<Q", valid[:8])[0]])
    data = valid[8 + struct.unpack("<Q", valid[:8])[0] :]

    def spelled(table):
        text = json.dumps(table).encode()
        return struct.pack("<Q", len(text)) + text + data

    search(mutated(valid) | mutated_json(table).map(spelled), holds, examples)


@EXAMPLES
def test_changed_file_with_valid_checksums_has_the_same_shapes_or_is_refused(folder, examples):
    path, state = folder / FILE, folder / "state.json"
    content = json.loads(state.read_bytes())["content"]
    shapes = read_state(folder).weights

    def holds(data):
        path.write_bytes(data)
        record = {"bytes": len(data), "checksums": [xxhash.xxh3_128_hexdigest(data)]}
        files = content["files"] | {FILE: record if data else {"bytes": 0, "checksums": []}}
        state.write_bytes(sealed_json.seal(content | {"files": files}))
        with contextlib.suppress(*REFUSALS):
            assert verify_checkpoint(folder).weights == shapes
        with contextlib.suppress(*REFUSALS):
            assert weights_of(folder).keys() == shapes.keys()

    search(mutated(path.read_bytes()), holds, examples)
