"""The files of the flash tier: direct I/O if the file system supports it, and failpoints for tests.

Direct I/O leaves the page cache and the processor to the computation: at full rate it slows a
matrix product by 2 %, buffered I/O by 17 % or more. Memory, offset and length must be multiples of
`ALIGNMENT_BYTES`; the layout ensures this.
"""

import errno
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from penstock.errors import CorruptionError, StorageError
from penstock.io import NotPlainError, durable, open_own

ALIGNMENT_BYTES = 4096


class ExtentFile:
    """A file of fixed size, read and written in aligned pieces from several threads.

    **Arguments:** `planned` are the ranges of a new file, as begin and size, that get disk space at
    once; None: the whole file. Other ranges get it when they are written.

    Raises:
        CorruptionError: an expected file is missing, too short, or not a regular file.
        StorageError: the system refuses to open an existing file.
        OSError: the system refuses to create the file.
    """

    def __init__(
        self,
        path: Path,
        size_bytes: int,
        *,
        create: bool,
        planned: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        self.path = path
        self.size_bytes = size_bytes
        if not create:
            self._descriptor = _open_existing(path, size_bytes)
            return
        self._descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            if size_bytes:
                # Allocates the blocks now, so that a full disk is found here and not during the
                # run.
                if planned is not None:
                    os.ftruncate(self._descriptor, size_bytes)
                for begin, size in [(0, size_bytes)] if planned is None else planned:
                    os.posix_fallocate(self._descriptor, begin, size)
        except BaseException:
            self.close()
            path.unlink(missing_ok=True)
            raise

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes go past the page cache."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        return bool(flags & getattr(os, "O_DIRECT", 0))

    def read(self, offset: int, into: np.ndarray) -> None:
        """Fill `into`, uint8 and contiguous, from `offset` on.

        Raises:
            StorageError: the file ends too early, or the system reports an error.
        """
        done = 0
        while done < into.nbytes:
            try:
                count = read_at(self._descriptor, into[done:], offset + done)
            except OSError as error:
                raise StorageError(
                    f"{self.path}: cannot read {into.nbytes:,} bytes at {offset:,}: "
                    f"{error.strerror}; check the disk"
                ) from error
            if count == 0:
                raise StorageError(
                    f"{self.path}: expected {self.size_bytes:,} bytes, the file ends at "
                    f"{offset + done:,}; it was truncated"
                )
            done += count

    def write(self, offset: int, data: np.ndarray) -> None:
        """Write `data`, uint8 and contiguous, at `offset`; durable only after `sync`."""
        done = 0
        while done < data.nbytes:
            done += write_at(self._descriptor, data[done:], offset + done)

    def sync(self) -> None:
        """Wait until all writes are on the medium; an error is final (`durable.sync`)."""
        durable.sync_data(self._descriptor)

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def read_at(descriptor: int, into: np.ndarray, offset: int) -> int:
    """Read once; tests inject faults here."""
    return os.preadv(descriptor, [into.data], offset)


def write_at(descriptor: int, data: np.ndarray, offset: int) -> int:
    """Write once; tests inject faults here."""
    return os.pwrite(descriptor, data.data, offset)


def _open_existing(path: Path, size_bytes: int) -> int:
    try:
        descriptor = _open(path, os.O_RDWR)
    except FileNotFoundError as error:
        raise CorruptionError(
            f"{path}: is missing, but the journal beside it refers to it; restore it from a copy"
        ) from error
    except NotPlainError as error:
        raise CorruptionError(f"{path}: {error.strerror}") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot use it: {error.strerror}") from error
    found = os.fstat(descriptor).st_size
    if found < size_bytes:
        os.close(descriptor)
        raise CorruptionError(
            f"{path}: expected {size_bytes:,} bytes, got {found:,}; the file was truncated, or "
            "belongs to another store"
        )
    return descriptor


def _open(path: Path, flags: int) -> int:
    """Open for direct I/O, or through the page cache if the file system does not support direct
    I/O."""
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        try:
            return open_own(path, flags | direct)
        except OSError as error:
            if error.errno != errno.EINVAL or isinstance(error, NotPlainError):
                raise
            if flags & os.O_CREAT:
                path.unlink(missing_ok=True)
    return open_own(path, flags)
