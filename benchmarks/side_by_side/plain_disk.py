"""A plain loop of direct reads and writes: what the disk gives to a program that does nothing else.

One thread reads, one writes, 8 MiB at a time, of a file that was filled with random bytes and
synced. Each goes on where it stopped, round the file, half of it apart, so that no part is met
again before the rest was. Through the page cache nothing would be measured: a folder without
direct I/O is refused.
"""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from side_by_side.pace import Pace

CHUNK_BYTES = 8 << 20
_PAGE_BYTES, _STAMP_BYTES = 4096, 8


class NoDirectIO(RuntimeError):
    """A folder's file system has no direct I/O."""


class PlainDisk:
    """Moves bytes to and from a file of its own.

    **Raises:** `NoDirectIO`.

    Args:
        path: where the file is made.
        file_bytes: its size; more than a step moves, and than the disk's own cache holds.
        pace: what holds the disk to a rate, if anything.
    """

    def __init__(self, path: Path, file_bytes: int, pace: Pace) -> None:
        import numpy as np

        from penstock.kernels.memory import allocate

        self.pace = pace
        self._chunks = max(2, file_bytes // CHUNK_BYTES)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(path, flags | os.O_DIRECT, 0o600)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise NoDirectIO(
                f"{path.parent} has no direct I/O, so the disk cannot be measured there; name a "
                "folder on a disk with --folder"
            ) from None
        # Aligned, private and in huge pages: other buffers halve the rate of direct reads.
        self._incoming, self._outgoing = allocate(CHUNK_BYTES), allocate(CHUNK_BYTES)
        generator = np.random.default_rng()
        for number in range(self._chunks):
            self._outgoing[:] = np.frombuffer(generator.bytes(CHUNK_BYTES), np.uint8)
            os.pwrite(self._file, self._outgoing.data, number * CHUNK_BYTES)
        os.fsync(self._file)
        self._reads, self._writes = 0, self._chunks // 2

    def move(self, read_bytes: int, written_bytes: int) -> None:
        """Read and write so many bytes, rounded to whole chunks, side by side."""
        with ThreadPoolExecutor(2) as threads:
            reading = threads.submit(self._read, round(read_bytes / CHUNK_BYTES))
            writing = threads.submit(self._write, round(written_bytes / CHUNK_BYTES))
            reading.result()
            writing.result()

    def _read(self, count: int) -> None:
        for _ in range(count):
            place = self._reads % self._chunks * CHUNK_BYTES
            with self.pace.moving(CHUNK_BYTES):
                if os.preadv(self._file, [self._incoming.data], place) != CHUNK_BYTES:
                    raise OSError(f"a read of {CHUNK_BYTES} bytes at {place} came back short")
            self._reads += 1

    def _write(self, count: int) -> None:
        import numpy as np

        pages = self._outgoing.reshape(-1, _PAGE_BYTES)
        for _ in range(count):
            # No page is written twice with the same content.
            stamp = np.array([self._writes], np.int64).view(np.uint8)
            pages[:, :_STAMP_BYTES] = stamp
            place = self._writes % self._chunks * CHUNK_BYTES
            with self.pace.moving(CHUNK_BYTES):
                if os.pwrite(self._file, self._outgoing.data, place) != CHUNK_BYTES:
                    raise OSError(f"a write of {CHUNK_BYTES} bytes at {place} came back short")
            self._writes += 1
