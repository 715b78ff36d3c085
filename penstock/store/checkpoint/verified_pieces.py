"""Pieces of a checkpoint's files: read, and compared with the description in `state.json`."""

import os
from pathlib import Path
from typing import BinaryIO

import xxhash

from penstock.errors import CorruptionError, StorageError
from penstock.io import Extent, NotPlainError, header_length, parse_header
from penstock.store.files import ANOTHER_CHECKPOINT, CHUNK_BYTES, FileRecord


def holds_header(
    path: Path, head: bytearray, record: FileRecord, extents: dict[str, Extent]
) -> bool:
    """Return whether `head`, the first bytes of a file, contains the whole header.

    Raises:
        CorruptionError: the header disagrees with `state.json` about the tensors' offsets.
    """
    length = header_length(path, head, record.bytes)
    if len(head) < length:
        return False
    if parse_header(path, head[:length], record.bytes) != extents:
        raise CorruptionError(
            f"{path}: its header differs from the header that state.json describes; "
            f"{ANOTHER_CHECKPOINT}"
        )
    return True


def read_into(path: Path, file: BinaryIO, data: memoryview) -> None:
    """Fill `data` from the current position of the file."""
    filled = 0
    while filled < len(data):
        count = os.readv(file.fileno(), [data[filled:]])
        if not count:
            raise CorruptionError(f"{path}: the file was shortened while it was read")
        filled += count


def require_checksum(
    path: Path,
    record: FileRecord,
    number: int,
    data: memoryview,
    ordered: list[tuple[str, Extent]],
) -> None:
    """Raise `CorruptionError` if a chunk's bytes have changed since they were written.

    `ordered` are the file's tensors in file order; the message names those in the chunk.
    """
    found, expected = xxhash.xxh3_128_hexdigest(data), record.checksums[number]
    begin = number * CHUNK_BYTES
    if found != expected:
        raise CorruptionError(
            f"{path}: damaged in bytes {begin:,} to {begin + len(data):,}, which hold "
            f"{_held(ordered, begin, begin + len(data))}: expected checksum {expected}, got "
            f"{found}; {ANOTHER_CHECKPOINT}"
        )


def _held(ordered: list[tuple[str, Extent]], begin: int, end: int) -> str:
    """Return the names of the tensors that overlap a range of bytes of a file, as text."""
    names = [name for name, extent in ordered if extent.begin < end and extent.end > begin]
    if begin == 0:
        names.insert(0, "the header")
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{rest}"


def unreadable(path: Path, error: OSError) -> CorruptionError | StorageError:
    """Return the error for a file of a checkpoint that cannot be read."""
    if isinstance(error, FileNotFoundError):
        return CorruptionError(f"{path}: this file is missing; {ANOTHER_CHECKPOINT}")
    if isinstance(error, NotPlainError):
        return CorruptionError(f"{path}: {error.strerror}, or use another checkpoint")
    return StorageError(
        f"{path}: cannot read it: {error.strerror}; check the disk, or use another checkpoint"
    )
