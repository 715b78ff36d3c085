"""The `safetensors` format, written and read piece by piece so that no model is in memory twice.

A file is 8 bytes with the header's length, the header (JSON: per tensor its type, shape and place),
then the tensors one after another. What the reader does not yet trust, it checks before it
allocates: lengths against the file's size, places against shapes, and that nothing overlaps.
"""

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from penstock.errors import CorruptionError
from penstock.store.files import ChecksummedFile, FileRecord

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.int64: "I64",
}
"""The element types that the store writes, and their names in the format."""

_ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}

MAX_HEADER_BYTES = 100_000_000
"""The `safetensors` library refuses longer headers, so no valid file has one."""

_MAX_OFFSET = 2**63 - 1
_MAX_DIMENSIONS = 64  # what NumPy allows; a product of a million large sizes would take hours


@dataclass(frozen=True)
class Entry:
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Extent:
    """Where a tensor lies in a file: bytes `begin` to `end`, from the file's start."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header(entries: Sequence[Entry]) -> bytes:
    """Return the first bytes of a file that holds `entries` in this order."""
    # `format` is what transformers asks for before it loads a file.
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        end = begin + entry.bytes
        table[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def extents(entries: Sequence[Entry]) -> dict[str, Extent]:
    """Return where the tensors lie in the file that `write` will make of `entries`."""
    begin = len(header(entries))
    table = {}
    for entry in entries:
        end = begin + entry.bytes
        table[entry.name] = Extent(DTYPES[entry.dtype], entry.shape, begin, end)
        begin = end
    return table


def in_file_order(entries: Iterable[Entry]) -> list[Entry]:
    """Sort entries so that each lies at a multiple of its element size, as readers expect."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def file_bytes(entries: Sequence[Entry]) -> int:
    """Return the size of the file that `write` will make of `entries`."""
    return len(header(entries)) + sum(entry.bytes for entry in entries)


def write(
    path: Path, entries: Sequence[Entry], pieces: Callable[[Entry], Iterable[np.ndarray]]
) -> FileRecord:
    """Write a new, synced file.

    Args:
        path: must not exist.
        entries: the tensors, `in_file_order`.
        pieces: gives a tensor's elements in order as contiguous arrays of any length.

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
                    f"{entry.name}: its pieces are {file.bytes - end + entry.bytes} bytes, "
                    f"its shape {entry.shape} asks for {entry.bytes}"
                )
        return file.finish()
    finally:
        file.close()


def header_length(path: Path, first: bytes | bytearray, total_bytes: int) -> int:
    """Return the bytes of the length field and the header together, from a file's first 8 bytes."""
    if len(first) < 8:
        raise _broken(path, f"it has {total_bytes} bytes, fewer than the 8 of a header's length")
    (length,) = struct.unpack("<Q", first[:8])
    if length > min(total_bytes - 8, MAX_HEADER_BYTES):
        raise _broken(path, f"its header claims {length:,} bytes, the file has {total_bytes:,}")
    return 8 + length


def parse_header(path: Path, data: bytes | bytearray, total_bytes: int) -> dict[str, Extent]:
    """Return the tensors of a file in the order in which they lie.

    Args:
        path: named in messages.
        data: the file's first `header_length` bytes.
        total_bytes: size of the file.

    Raises:
        CorruptionError: the header is no JSON of the right form, or describes tensors that
            overlap, leave gaps or reach beyond the file.
    """
    try:
        table = json.loads(bytes(data[8:]), object_pairs_hook=_without_repetition)
        for name in table:
            str(name).encode()  # half a surrogate pair is text in JSON, and nowhere else
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise _broken(path, "its header is not a table")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(path, f"its metadata is not a table of texts: {str(metadata)[:100]}")
    extents = [(name, _extent(path, name, entry, len(data))) for name, entry in table.items()]
    extents.sort(key=lambda item: (item[1].begin, item[1].end))
    place = len(data)
    for name, extent in extents:
        if extent.begin != place:
            raise _broken(path, f"tensor {name!r} begins at {extent.begin}, {place} was expected")
        place = extent.end
    if place != total_bytes:
        raise _broken(path, f"its tensors end at {place:,}, the file at {total_bytes:,}")
    return dict(extents)


def _without_repetition(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table


def _extent(path: Path, name: str, entry: object, start: int) -> Extent:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            type(begin) is type(end) is int and 0 <= begin <= end <= _MAX_OFFSET
        ):
            extent = Extent(dtype, tuple(shape), start + begin, start + end)
            if is_sound(extent):
                return extent
    raise _broken(path, f"tensor {name!r} is described by {str(entry)[:200]}")


def is_sound(extent: Extent) -> bool:
    """Return whether a described extent is one that a file can have: its type is known, its shape
    fills it, and its elements are aligned."""
    size = _ITEM_BYTES.get(extent.dtype)
    return (
        size is not None
        and len(extent.shape) <= _MAX_DIMENSIONS
        and all(type(length) is int and 0 <= length < 2**63 for length in extent.shape)
        and type(extent.begin) is type(extent.end) is int
        and 0 <= extent.begin <= extent.end <= _MAX_OFFSET
        and math.prod(extent.shape) * size == extent.end - extent.begin
        and extent.begin % size == 0
    )


def _broken(path: Path, what: str) -> CorruptionError:
    return CorruptionError(f"{path}: not a usable safetensors file: {what}; restore it from a copy")


def elements(data: memoryview, dtype: str) -> np.ndarray:
    """View bytes as a flat array of the format's type; bfloat16 comes as uint16."""
    kinds = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "U8": np.uint8}
    return np.frombuffer(data, dtype=kinds.get(dtype, np.int64))


def pieces_of(tensor: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield a small tensor as the one piece that `write` wants."""
    flat = tensor.detach().contiguous().flatten()
    yield flat.view(torch.uint8).numpy()
