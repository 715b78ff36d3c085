"""The store's files: contents carry checksums, and folders appear atomically.

`penstock/io/durable.py` makes them durable. Errors of the operating system become a `StorageError`
that states the free space.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from penstock.errors import ConfigError, StorageError
from penstock.io import durable, failpoints, is_full, remove, write_advice

CHUNK_BYTES = 8 << 20
"""Bytes under one checksum; a multiple of every element size."""


ANOTHER_CHECKPOINT = (
    "use another checkpoint: without a store on flash, `penstock inspect RUN --repair` goes back "
    "to the newest intact one"
)


@dataclass(frozen=True)
class FileRecord:
    """The data with which a reader verifies a file: its size, and one checksum per chunk."""

    bytes: int
    checksums: tuple[str, ...]


class ChecksummedFile:
    """A new file, written sequentially; computes the checksums of its chunks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._checksums: list[str] = []
        self._hash = xxhash.xxh3_128()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: bytes | np.ndarray) -> None:
        """Append bytes, or the bytes of a contiguous array."""
        view = (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")
        while len(view):
            piece = view[: CHUNK_BYTES - self.bytes % CHUNK_BYTES]
            self._hash.update(piece)
            durable.write_all(self._descriptor, piece)
            self.bytes += len(piece)
            if self.bytes % CHUNK_BYTES == 0:
                self._end_chunk()
            view = view[len(piece) :]

    def finish(self) -> FileRecord:
        """Sync and close the file, and return its record."""
        if self.bytes % CHUNK_BYTES:
            self._end_chunk()
        durable.sync(self._descriptor)
        self.close()
        return FileRecord(self.bytes, tuple(self._checksums))

    def close(self) -> None:
        """Close the file without syncing it; closing twice is allowed."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _end_chunk(self) -> None:
        self._checksums.append(self._hash.hexdigest())
        self._hash.reset()


@contextmanager
def appearing_folder(folder: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield an empty folder to write to; it gets its final name when all its files are on disk.

    A folder that a killed process has left under the temporary name is removed before.

    Args:
        folder: must not exist yet, or be empty.
        needed_bytes: bytes that will be written into it.

    Raises:
        ConfigError: the folder is in use.
        StorageError: the disk is full, read-only or failing; no partial file remains.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: already in use; choose a new folder, or delete this one")
    with storage_errors(folder, needed_bytes):
        durable.make_folder(folder.parent)
        durable.remove_unfinished(folder)  # of a killed process: the space is needed
        require_space(folder, needed_bytes)
        with durable.new_folder(folder) as temporary:
            yield temporary


def remove_folder(folder: Path) -> None:
    """Delete a folder; after a crash either the whole folder or nothing has its name."""
    old_folder = folder.with_name(f"{durable.TEMPORARY_PREFIX}old-{folder.name}")
    remove(old_folder)
    os.rename(folder, old_folder)
    durable.sync_folder(folder.parent)
    failpoints.point("remove.after_rename")
    remove(old_folder)


def remove_temporaries(folder: Path) -> None:
    """Delete unfinished files that a crash has left directly inside `folder`.

    A killed process may have renamed some of them without a sync. The names are synced first, so
    that a partial file cannot reappear under a final name.
    """
    found = list(folder.glob(f"{durable.TEMPORARY_PREFIX}*"))
    if found:
        durable.sync_folder(folder)
    for path in found:
        remove(path)


def free_bytes(folder: Path) -> int:
    """Return the bytes that an unprivileged user may still write to the file system of `folder`."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextmanager
def storage_errors(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Convert errors of the operating system inside the block into a `StorageError`.

    Args:
        folder: the folder that is written, named in the message.
        needed_bytes: bytes of the whole folder.
    """
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = write_advice(error, "free some space or choose another folder")
        space = ""
        if is_full(error):
            free = free_bytes(folder.parent)
            space = f"; it needs {needed_bytes:,} bytes, {free:,} bytes are free"
        raise StorageError(
            f"{folder}: cannot write it: {reason}{space}; {advice}; "
            "what was saved before is unchanged"
        ) from error


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise `OSError` (disk full) at once if `needed_bytes` do not fit on the file system of
    `folder`."""
    if free_bytes(folder.parent) < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
