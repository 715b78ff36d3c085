"""Hostile Hugging Face folders: refused by name, without taking memory, following names or hanging.

Whoever gives a folder away decides every byte of it. What must come back is one of our errors. No
file outside of the folder may be read, and no memory be taken because a file asks for it.
"""

import json
import os
import struct
import tracemalloc

import pytest
import torch
from hf_folders import model_of, save, set_config
from safetensors.torch import load_file, save_file

from penstock.errors import ConfigError, CorruptionError, PenstockError, StorageError
from penstock.models import ModelSource, WeightFiles

LIMIT_BYTES = 4 << 20


def refused(make, error=PenstockError, match=None):
    """Call `make`, expect an error of ours, and see that little memory was taken for it."""
    tracemalloc.start()
    try:
        with pytest.raises(error, match=match) as caught:
            make()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < LIMIT_BYTES
    return str(caught.value)


def tensor(dtype="F32", shape=(1,), begin=0, end=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


HEADERS = {
    "an empty file": b"",
    "half a length": b"\0\0\0",
    "a header of 2^60 bytes": raw({}, length=2**60),
    "a header of 2^64 - 1 bytes": raw({}, length=2**64 - 1),
    "a header one byte beyond the file": raw({}, length=3),
    "no JSON": raw(b"}{"),
    "a number that JSON lacks": raw({"a": tensor() | {"note": float("nan")}}, b"0000"),
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94",
    "deep nesting": raw(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a list": raw([]),
    "2^60 elements": raw({"a": tensor(shape=[2**60], end=2**62)}),
    "sizes whose product wraps to 0": raw({"a": tensor(shape=[2**32, 2**32], end=0)}),
    "a negative size": raw({"a": tensor(shape=[-1])}, b"0000"),
    "a range beyond the file": raw({"a": tensor(shape=[2], end=8)}, b"0000"),
    "a range before the data": raw({"a": tensor(begin=-4, end=0)}, b"0000"),
    "a range of 2^62": raw({"a": tensor(begin=2**62, end=2**62 + 4)}, b"0000"),
    "overlapping ranges": raw(
        {"a": tensor(shape=[2], end=8), "b": tensor(shape=[2], begin=4, end=12)}, b"0" * 12
    ),
    "the same range twice": raw({"a": tensor(), "b": tensor()}, b"0000"),
    "a hole": raw({"a": tensor(), "b": tensor(begin=8, end=12)}, b"0" * 12),
    "bytes behind the last tensor": raw({"a": tensor()}, b"0" * 8),
    "a name twice": raw(
        b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
        b'"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    ),
    "a name that is no text": raw(b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
    "metadata that is no text": raw(b'{"__metadata__":{"format":"\\ud800"}}'),
    "metadata that is no table": raw({"__metadata__": [1]}),
    "a type of half a byte": raw({"a": tensor("F4", [8])}, b"0000"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_hostile_headers_are_refused(tmp_path, what):
    (tmp_path / "model.safetensors").write_bytes(HEADERS[what])
    message = refused(lambda: WeightFiles(tmp_path), CorruptionError)
    assert str(tmp_path / "model.safetensors") in message


def test_absent_header_of_100_megabytes_allocates_nothing(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)  # sparse: it costs nothing to send
    refused(lambda: WeightFiles(tmp_path), CorruptionError, "header claims 200,000,000 bytes")


FILE_NAMES = [
    "../secret.safetensors",
    "/etc/secret.safetensors",
    "sub/secret.safetensors",
    "..",
    "",
    ".hidden.safetensors",
    "..\\secret.safetensors",
    "secret\0.safetensors",
    "secret\ud800.safetensors",
    "model.bin",
    "config.json",
    7,
    None,
    ["model.safetensors"],
]


@pytest.mark.parametrize("file", FILE_NAMES, ids=repr)
def test_index_with_files_outside_the_folder(tmp_path, file, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    index = {"weight_map": {"a": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = []
    really = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest: opened.append(str(path)) or really(path, *rest)
    )
    refused(
        lambda: WeightFiles(folder), CorruptionError, "expected the plain name of a .safetensors"
    )
    assert opened == [str(folder / "model.safetensors.index.json")]


INDEXES = {
    "no JSON": b"{",
    "no object": b"[1, 2]",
    "no map": b"{}",
    "an empty map": b'{"weight_map": {}}',
    "a map that is a list": b'{"weight_map": ["model.safetensors"]}',
    "deep nesting": b'{"weight_map":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of a million digits": b'{"weight_map":' + b"9" * 1_000_000 + b"}",
    "bytes that are no text": b"\xff\xfe\xfd",
    "a shard that is not there": b'{"weight_map": {"a": "absent.safetensors"}}',
    "a name too long for a file": b'{"weight_map": {"a": "' + b"x" * 5000 + b'.safetensors"}}',
}


@pytest.mark.parametrize("what", INDEXES)
def test_hostile_indexes_are_refused(tmp_path, what):
    (tmp_path / "model.safetensors.index.json").write_bytes(INDEXES[what])
    refused(lambda: WeightFiles(tmp_path), (CorruptionError, StorageError))


def shards(folder, index, **tensors):
    for name, content in tensors.items():
        save_file(content, folder / f"{name}.safetensors")
    listed = {key: f"{value}.safetensors" for key, value in index.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


def test_a_name_in_two_shards(tmp_path):
    both = {"a": torch.ones(1)}
    shards(tmp_path, {"a": "one", "b": "two"}, one=both, two={"b": torch.ones(1), **both})
    match = "'a' is both in one.safetensors and in two.safetensors; keep one of them"
    refused(lambda: WeightFiles(tmp_path), CorruptionError, match)


def test_index_with_wrong_tensor_location(tmp_path):
    content = {"one": {"a": torch.ones(1)}, "two": {"b": torch.ones(1)}}
    shards(tmp_path, {"a": "two", "b": "one"}, **content)
    refused(lambda: WeightFiles(tmp_path), CorruptionError, "in two.safetensors, which has no")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_pipes_devices_and_folders_are_not_waited_for(tmp_path, name):
    for number, make in enumerate((os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p))):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / name)
        refused(lambda folder=folder: WeightFiles(folder), CorruptionError, "expected a file, got")


def test_links_that_lead_nowhere_or_in_circles(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    refused(lambda: WeightFiles(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("absent")
    refused(lambda: WeightFiles(tmp_path), ConfigError, "expected model.safetensors or")


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return save(model_of("llama"), tmp_path_factory.mktemp("honest"))


CONFIGS = {
    "a billion layers": {"num_hidden_layers": 10**9},
    "a width of 2^60": {"hidden_size": 2**60},
    "a vocabulary of 2^62": {"vocab_size": 2**62},
    "a negative width": {"hidden_size": -32},
    "no heads": {"num_attention_heads": 0},
    "a width that is a text": {"hidden_size": "32"},
    "an unknown type": {"model_type": "../../evil"},
    "a type that is a list": {"model_type": ["llama"]},
    "an unknown activation": {"hidden_act": "os.system"},
    "a type that is no language model": {"model_type": "vit"},
}


@pytest.mark.parametrize("what", CONFIGS)
def test_hostile_configurations_are_refused(tmp_path, honest, what):
    for path in honest.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    set_config(tmp_path, **CONFIGS[what])
    with pytest.raises(PenstockError):
        ModelSource.from_hf(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_invalid_configuration_is_refused(tmp_path, content):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(content)
    refused(lambda: ModelSource.from_hf(tmp_path), ConfigError, "as a Hugging Face config")


def test_endless_configuration_is_refused(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to("/dev/zero")
    refused(lambda: ModelSource.from_hf(tmp_path), CorruptionError, "expected a file, got")
    (tmp_path / "config.json").unlink()
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)
    refused(lambda: ModelSource.from_hf(tmp_path), CorruptionError, "at most 67,108,864 are")


def test_code_in_folder_is_not_run(tmp_path, honest):
    for path in honest.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    witness = tmp_path / "ran"
    (tmp_path / "modeling_evil.py").write_text(f"open({str(witness)!r}, 'w')\n")
    set_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (tmp_path / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
    source = ModelSource.from_hf(tmp_path)
    assert dict(source.initial_weights(0)).keys() == load_file(honest / "model.safetensors").keys()
    assert not witness.exists()
