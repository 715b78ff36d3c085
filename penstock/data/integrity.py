"""Verifying stored bytes against the manifest: sizes at open, checksums per chunk.

A message names the file, the bytes and both checksums, so that a bad disk can be distinguished from
a bad copy.
"""

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from penstock.data.manifest import DataFileRecord, advice_for
from penstock.errors import CorruptionError


def check_size(folder: Path, record: DataFileRecord) -> None:
    """Raise CorruptionError unless the file exists with the size in the manifest."""
    path = folder / record.file
    try:
        size_bytes = path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise CorruptionError(
            f"cannot read {path}: {error.strerror}; {advice_for(folder)}"
        ) from None
    if size_bytes is None:
        raise CorruptionError(f"{path} is missing; {advice_for(folder)}")
    if size_bytes != record.size_bytes:
        state = "cut short" if size_bytes < record.size_bytes else "too long"
        raise CorruptionError(
            f"{path} is {state}: {size_bytes} bytes, expected {record.size_bytes}; "
            f"{advice_for(folder)}"
        )


def map_file(folder: Path, record: DataFileRecord) -> np.ndarray:
    """Return the bytes of a file as a read-only memory map, uint8 [size]; nothing is read yet."""
    if record.size_bytes == 0:  # the system refuses to map an empty file
        return np.empty(0, dtype=np.uint8)
    try:
        return np.memmap(folder / record.file, dtype=np.uint8, mode="r", shape=record.size_bytes)
    except (OSError, ValueError) as error:
        raise CorruptionError(
            f"cannot map {folder / record.file}: {error}; {advice_for(folder)}"
        ) from None


def release_pages(part: np.ndarray) -> None:
    """Release the pages of a part of a map, which the system counts as the process's memory.

    A later read maps them again, from the page cache if they are still cached.
    """
    whole = part
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    region = whole.base
    if not isinstance(region, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin = part.ctypes.data - np.frombuffer(region, np.uint8).ctypes.data
    start = begin - begin % mmap.PAGESIZE
    region.madvise(mmap.MADV_DONTNEED, start, begin + part.nbytes - start)


def check_chunk(
    folder: Path, record: DataFileRecord, content: np.ndarray, number: int, chunk_bytes: int
) -> None:
    """Raise CorruptionError unless chunk `number` of `content`, uint8 [size], matches its
    checksum."""
    start = number * chunk_bytes
    chunk = content[start : start + chunk_bytes]
    actual = xxhash.xxh3_128_hexdigest(chunk.data)
    release_pages(chunk)
    if actual != record.chunks[number]:
        raise CorruptionError(
            f"{folder / record.file} is corrupt between byte {start} and {start + chunk.size}: "
            f"checksum {actual}, expected {record.chunks[number]}; {advice_for(folder)}"
        )


class CheckedFile:
    """A file of a data set, memory-mapped; each chunk is verified before its first use.

    Args:
        folder, record, chunk_bytes: the file, and the bytes per checksum.
        check: called with a chunk, uint8, and the offset of its first byte, after the checksum
            matched.
    """

    def __init__(
        self,
        folder: Path,
        record: DataFileRecord,
        chunk_bytes: int,
        check: Callable[[np.ndarray, int], None] = lambda content, start: None,
    ) -> None:
        self._check = check
        self._folder = folder
        self._record = record
        self._chunk_bytes = chunk_bytes
        self._content: np.ndarray | None = None
        self._checked = np.zeros(len(record.chunks), dtype=bool)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return bytes `start` to `stop`, uint8 [stop - start], not a copy.

        Raises:
            CorruptionError: the file cannot be mapped, or a chunk among them fails its checksum.
        """
        if self._content is None:
            self._content = map_file(self._folder, self._record)
        for chunk in range(start // self._chunk_bytes, -(-stop // self._chunk_bytes)):
            if not self._checked[chunk]:
                check_chunk(self._folder, self._record, self._content, chunk, self._chunk_bytes)
                first = chunk * self._chunk_bytes
                self._check(self._content[first : first + self._chunk_bytes], first)
                self._checked[chunk] = True
        return self._content[start:stop]


def read_checked(folder: Path, record: DataFileRecord, chunk_bytes: int) -> np.ndarray:
    """Return a whole file, uint8 [size], with every chunk verified."""
    check_size(folder, record)
    content = map_file(folder, record)
    for number in range(len(record.chunks)):
        check_chunk(folder, record, content, number, chunk_bytes)
    return content
