"""Reads and writes of a disk as cases, through the files of the flash tier.

One temporary file is written, then read and overwritten. It has no name while it is measured, so it
disappears with the process, however that ends.
"""

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from penstock.calibration.repetitions import Case, Prepared, Quantity
from penstock.errors import StorageError
from penstock.io import durable
from penstock.kernels.memory import allocate
from penstock.store.flash import ExtentFile

FILE_BYTES = 128 << 20
PIECE_BYTES = (1 << 20, 8 << 20)
_SAMPLE_BYTES = 32 << 20
# With the file itself and the warm-up of each case, at most 512 MiB are written.
_MOST_WRITES = 3
_LEAST_FREE_BYTES = 2 * FILE_BYTES  # a disk should not be filled to the last block
_ADVICE = "give a folder on another disk with --flash-dir"


class Disk:
    """A file on the disk of a folder that is measured, and the ways of using it."""

    def __init__(self, file: ExtentFile, folder: Path) -> None:
        self._file, self._folder = file, folder
        self._begin = 0
        self.is_direct = file.is_direct
        self._data, self._read = allocate(_SAMPLE_BYTES), allocate(_SAMPLE_BYTES)
        self._data[:] = np.random.default_rng(0).integers(256, size=_SAMPLE_BYTES, dtype=np.uint8)

    def fill(self) -> None:
        """Write the whole file: blocks that were never written are read without the disk."""
        with _errors_of_disk(self._folder):
            for _ in range(FILE_BYTES // _SAMPLE_BYTES):
                self._write(self._next(), PIECE_BYTES[-1], _SAMPLE_BYTES)
            self._file.sync()

    def cases(self) -> Iterator[Case]:
        """Yield reads, writes, and both at once."""
        for piece in PIECE_BYTES:
            yield self._case("flash read", piece, None)
            yield self._case("flash write", piece, _MOST_WRITES)
        yield self._case("flash both", PIECE_BYTES[-1], _MOST_WRITES)

    def _case(self, work: str, piece: int, most: int | None) -> Case:
        def run() -> None:
            begin = self._next()
            with _errors_of_disk(self._folder):
                if work == "flash read":
                    self._fetch(begin, piece, _SAMPLE_BYTES)
                elif work == "flash write":
                    self._write(begin, piece, _SAMPLE_BYTES)
                    self._file.sync()
                else:
                    self._both(begin, piece)

        prepared = Prepared(run, _SAMPLE_BYTES, piece)
        return Case(Quantity("flash", work), lambda: prepared, most)

    def _both(self, begin: int, piece: int) -> None:
        """Write the first half of a sample while another thread reads the second half."""
        half = _SAMPLE_BYTES // 2
        errors: list[BaseException] = []

        def fetch() -> None:
            try:
                self._fetch(begin + half, piece, half)
            except BaseException as error:
                errors.append(error)

        reader = threading.Thread(target=fetch, name="penstock calibration", daemon=True)
        reader.start()
        try:
            self._write(begin, piece, half)
            self._file.sync()
        finally:
            reader.join()
        if errors:
            raise errors[0]

    def _next(self) -> int:
        """Return where the next sample begins; samples go through the file in turn."""
        begin = self._begin
        self._begin = (begin + _SAMPLE_BYTES) % FILE_BYTES
        return begin

    def _write(self, begin: int, piece: int, size: int) -> None:
        for offset in range(0, size, piece):
            self._file.write(begin + offset, self._data[offset : offset + piece])

    def _fetch(self, begin: int, piece: int, size: int) -> None:
        for offset in range(0, size, piece):
            self._file.read(begin + offset, self._read[offset : offset + piece])


@contextmanager
def measured_disk(folder: Path) -> Iterator[Disk]:
    """Yield the disk of a folder; nothing of it remains.

    Raises:
        StorageError: the disk is too full, or the system refuses to write there.
    """
    with ExitStack() as stack:
        with _errors_of_disk(folder):
            found = os.statvfs(folder)
            free = found.f_bavail * found.f_frsize
            if free < _LEAST_FREE_BYTES:
                raise StorageError(
                    f"{folder}: expected {_LEAST_FREE_BYTES:,} free bytes to measure this disk, "
                    f"got {free:,}; free some space, or {_ADVICE}"
                )
            disk = Disk(stack.enter_context(_unnamed_file(folder)), folder)
        disk.fill()
        yield disk


@contextmanager
def _errors_of_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot measure this disk: {error.strerror or error}; {_ADVICE}"
        ) from error


@contextmanager
def _unnamed_file(folder: Path) -> Iterator[ExtentFile]:
    """Yield a new file without a name."""
    inner = Path(tempfile.mkdtemp(prefix=f"{durable.TEMPORARY_PREFIX}calibration-", dir=folder))
    try:
        file = ExtentFile(inner / "extents", FILE_BYTES, create=True)
    finally:
        (inner / "extents").unlink(missing_ok=True)
        inner.rmdir()
    try:
        yield file
    finally:
        file.close()
