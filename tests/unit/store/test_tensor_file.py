"""The safetensors format: the library reads what we write, and hostile files are refused."""

import json
import struct
import tracemalloc

import numpy as np
import pytest
import safetensors.torch
import torch

from penstock.errors import CorruptionError
from penstock.io.safetensors_header import header_length, parse_header
from penstock.store import tensor_file
from penstock.store.files import CHUNK_BYTES
from penstock.store.tensor_file import Entry


def _write(path, tensors):
    entries = tensor_file.in_file_order(
        Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    )

    def pieces(entry):
        flat = tensors[entry.name].contiguous().view(-1).view(torch.uint8).numpy()
        step = 1 << 20
        for begin in range(0, flat.size, step):
            yield flat[begin : begin + step]

    return entries, tensor_file.write(path, entries, pieces)


@pytest.mark.parametrize("seed", range(3))
def test_the_safetensors_library_reads_the_same_tensors(tmp_path, seed):
    torch.manual_seed(seed)
    tensors = {
        "bytes": torch.randint(0, 255, (13,), dtype=torch.uint8),
        "half": torch.randn(5, 3).bfloat16(),
        "über/långt namn": torch.randn(2, 3, 4),
        "scalar": torch.randn(()),
        "empty": torch.empty(0, 4),
        "large": torch.randn(3_000_000),
    }
    path = tmp_path / "a.safetensors"
    entries, record = _write(path, tensors)
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), f"{name}, seed {seed}"
    assert record.bytes == path.stat().st_size == tensor_file.file_bytes(entries)
    assert len(record.checksums) == -(-record.bytes // CHUNK_BYTES)


def test_our_parser_agrees_with_the_library_on_its_files(tmp_path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).half(), "c": torch.arange(4)}
    data = safetensors.torch.save(tensors, {"key": "value"})
    extents = _parse(tmp_path, data)
    assert extents.keys() == tensors.keys()
    for name, extent in extents.items():
        raw = tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert data[extent.begin : extent.end] == raw
        assert extent.shape == tuple(tensors[name].shape)


def test_incomplete_pieces_of_a_tensor_are_refused(tmp_path):
    entry = Entry("a", torch.float32, (4,))
    with pytest.raises(ValueError, match=r"a: expected .* bytes for shape .*, got 12"):
        tensor_file.write(tmp_path / "a", [entry], lambda _: [np.zeros(3, np.float32)])


def _file(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _tensor(dtype, shape, *offsets):
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


HOSTILE = {
    "shorter than a length": b"\0\0\0",
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a header beyond the file": struct.pack("<Q", 100) + b"{}",
    "no JSON": _file(b"}{"),
    "no text": _file(b"\xff\xfe\xfd"),
    "deep nesting": _file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "a number of a million digits": _file(b'{"a":' + b"9" * 1_000_000 + b"}"),
    "a list": _file([]),
    "a tensor that is a number": _file({"a": 1}),
    "2^60 elements": _file({"a": _tensor("F32", [2**60], 0, 2**62)}),
    "sizes whose product wraps to 0": _file({"a": _tensor("F32", [2**32, 2**32], 0, 0)}),
    "100,000 dimensions": _file({"a": _tensor("F32", [2**62] * 100_000, 0, 4)}, b"0000"),
    "a negative size": _file({"a": _tensor("F32", [-1], 0, 4)}, b"0000"),
    "a size that is true": _file({"a": _tensor("F32", [True], 0, 4)}, b"0000"),
    "a size that is a fraction": _file({"a": _tensor("F32", [1.0], 0, 4)}, b"0000"),
    "negative offsets": _file({"a": _tensor("F32", [1], -4, 0)}, b"0000"),
    "offsets the wrong way round": _file({"a": _tensor("F32", [1], 4, 0)}, b"0000"),
    "an unknown type": _file({"a": _tensor("F128", [1], 0, 16)}, b"0" * 16),
    "bytes that do not fit the shape": _file({"a": _tensor("F32", [2], 0, 4)}, b"0000"),
    "overlapping tensors": _file(
        {"a": _tensor("F32", [2], 0, 8), "b": _tensor("F32", [2], 4, 12)}, b"0" * 12
    ),
    "a gap": _file({"a": _tensor("F32", [1], 0, 4), "b": _tensor("F32", [1], 8, 12)}, b"0" * 12),
    "bytes behind the last tensor": _file({"a": _tensor("F32", [1], 0, 4)}, b"0" * 8),
    "a name twice": _file(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"0000",
    ),
}


def _parse(path, data):
    length = header_length(path, data[:8], len(data))
    return parse_header(path, data[:length], len(data))


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_headers_are_refused_without_allocating(tmp_path, what):
    data = HOSTILE[what]
    path = tmp_path / "x.safetensors"
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match="not a usable safetensors file"):
            _parse(path, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(data) + (1 << 20)
