"""The header of a `safetensors` file, validated before use.

The format: 8 bytes with the header's length, the header (JSON: per tensor its type, shape and
offsets), then the tensors one after another. Lengths are checked against the file's size before
memory is allocated, and offsets against shapes. Tensors may not overlap or leave gaps.
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import CorruptionError

MAX_HEADER_BYTES = 100_000_000
"""The `safetensors` library refuses longer headers, so no valid file has one."""

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Bytes per element of the format's types; types of less than a byte are not used for weights."""

_MAX_OFFSET = 2**63 - 1
_MAX_DIMENSIONS = 64  # NumPy's limit; a product of a million large sizes would take hours


@dataclass(frozen=True)
class Extent:
    """The location of a tensor in a file: bytes `begin` to `end`, from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_length(path: Path, first: bytes | bytearray, total_bytes: int) -> int:
    """Return the length of the length field and the header together, from a file's first 8
    bytes."""
    if len(first) < 8:
        raise _broken(path, f"it has {total_bytes} bytes, fewer than the 8 of a header's length")
    (length,) = struct.unpack("<Q", first[:8])
    if length > min(total_bytes - 8, MAX_HEADER_BYTES):
        raise _broken(path, f"its header claims {length:,} bytes, the file has {total_bytes:,}")
    return 8 + length


def parse_header(path: Path, data: bytes | bytearray, total_bytes: int) -> dict[str, Extent]:
    """Return the tensors of a file in file order.

    Args:
        path: named in messages.
        data: the file's first `header_length` bytes.
        total_bytes: size of the file.

    Raises:
        CorruptionError: the header is not valid JSON of this format, or describes tensors that
            overlap, leave gaps or exceed the file.
    """
    try:
        table = json.loads(
            bytes(data[8:]), object_pairs_hook=_table_of_texts, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise _broken(path, "its header is not a mapping")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(path, f"its metadata is not a mapping of strings: {str(metadata)[:100]}")
    extents = [(name, _extent(path, name, entry, len(data))) for name, entry in table.items()]
    extents.sort(key=lambda item: (item[1].begin, item[1].end))
    place = len(data)
    for name, extent in extents:
        if extent.begin != place:
            raise _broken(path, f"expected tensor {name!r} to begin at {place}, got {extent.begin}")
        place = extent.end
    if place != total_bytes:
        raise _broken(path, f"its tensors end at {place:,}, the file at {total_bytes:,}")
    return dict(extents)


def _table_of_texts(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    for text in (each for pair in pairs for each in pair if isinstance(each, str)):
        text.encode()  # JSON can contain half a surrogate pair; UTF-8 cannot
    return table


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")  # although Python treats it as an integer


def _extent(path: Path, name: str, entry: object, start: int) -> Extent:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            type(begin) is type(end) is int and 0 <= begin <= end <= _MAX_OFFSET
        ):
            extent = Extent(dtype, tuple(shape), start + begin, start + end)
            if _fills(extent):  # some writers of this format do not align their tensors
                return extent
    raise _broken(path, f"tensor {name!r} is described by {str(entry)[:200]}")


def is_sound(extent: Extent) -> bool:
    """Return whether an extent can be one that Penstock wrote: the type is known, the shape fills
    it, and the elements are aligned."""
    return _fills(extent) and extent.begin % ITEM_BYTES[extent.dtype] == 0


def _fills(extent: Extent) -> bool:
    size = ITEM_BYTES.get(extent.dtype)
    return (
        size is not None
        and len(extent.shape) <= _MAX_DIMENSIONS
        and all(type(length) is int and 0 <= length < 2**63 for length in extent.shape)
        and type(extent.begin) is type(extent.end) is int
        and 0 <= extent.begin <= extent.end <= _MAX_OFFSET
        and math.prod(extent.shape) * size == extent.end - extent.begin
    )


def _broken(path: Path, what: str) -> CorruptionError:
    return CorruptionError(f"{path}: not a usable safetensors file: {what}; restore it from a copy")
