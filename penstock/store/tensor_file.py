"""The `safetensors` format, written in pieces so that no model is in memory twice.

A file consists of 8 bytes with the header's length, the header (JSON: per tensor its type, shape
and offsets), and the tensors one after another. `safetensors_header.py` reads and validates
headers.
"""

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.io import Extent
from penstock.store.files import ChecksummedFile, FileRecord

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.int64: "I64",
}
"""The element types that the store writes, and their names in the format."""

_NAMES = {
    **DTYPES,
    torch.bool: "BOOL",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""Further types of buffers, which only an export writes."""

_NUMPY = {
    "F32": np.float32,
    "BF16": np.uint16,
    "F16": np.float16,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
}


@dataclass(frozen=True)
class Entry:
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header(entries: Sequence[Entry]) -> bytes:
    """Return the first bytes of a file that contains `entries` in this order."""
    # transformers requires the key `format` before it loads a file.
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        end = begin + entry.bytes
        table[entry.name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def extents(entries: Sequence[Entry]) -> dict[str, Extent]:
    """Return the offsets of the tensors in the file that `write` will create from `entries`."""
    begin = len(header(entries))
    table = {}
    for entry in entries:
        end = begin + entry.bytes
        table[entry.name] = Extent(DTYPES[entry.dtype], entry.shape, begin, end)
        begin = end
    return table


def refuse_unknown_types(buffers: Mapping[str, torch.Tensor]) -> None:
    """Raise `ConfigError` for a buffer whose element type the format does not have."""
    for name, buffer in buffers.items():
        if buffer.dtype not in _NAMES:
            raise ConfigError(
                f"buffer {name}: expected a data type of safetensors, found {buffer.dtype}; "
                "register it with persistent=False, or store it as another type"
            )


def in_file_order(entries: Iterable[Entry]) -> list[Entry]:
    """Sort entries so that each is aligned to its element size, as readers expect."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def file_bytes(entries: Sequence[Entry]) -> int:
    """Return the size of the file that `write` will create from `entries`."""
    return len(header(entries)) + sum(entry.bytes for entry in entries)


def write(
    path: Path, entries: Sequence[Entry], pieces: Callable[[Entry], Iterable[np.ndarray]]
) -> FileRecord:
    """Write a new, synced file.

    Args:
        path: must not exist.
        entries: the tensors, `in_file_order`.
        pieces: returns a tensor's elements in order as contiguous arrays of any length.

    Returns:
        The file's size and checksums.
    """
    file = ChecksummedFile(path)
    try:
        file.write(header(entries))
        for entry in entries:
            end = file.bytes + entry.bytes
            for piece in pieces(entry):
                file.write(piece)
            if file.bytes != end:
                raise ValueError(
                    f"{entry.name}: expected {entry.bytes} bytes for shape {entry.shape}, got "
                    f"{file.bytes - end + entry.bytes}"
                )
        return file.finish()
    finally:
        file.close()


def elements(data: memoryview, dtype: str) -> np.ndarray:
    """View bytes as a flat array of the format's type; bfloat16 is viewed as uint16."""
    return np.frombuffer(data, dtype=_NUMPY.get(dtype, np.int64))


def pieces_of(tensor: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield a small tensor as the single piece that `write` requires."""
    flat = tensor.detach().contiguous().flatten()
    yield flat.view(torch.uint8).numpy()
