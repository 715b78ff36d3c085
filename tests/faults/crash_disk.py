"""A disk that loses, on a crash, any part of what was not synced, sector by sector.

Writes go to real files; what each overwrote is remembered until the file is synced. A crash stops
the process's writing at a chosen operation, and puts back a random subset of the unsynced sectors:
so they are dropped, kept out of order, or torn. A new name whose folder was not synced may be gone.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

from penstock.store import files
from penstock.store.flash import medium

SECTOR = 512


class Crashed(OSError):
    """What the process meets when its machine goes down; nothing it does after that counts."""


class CrashDisk:
    """Install with `with CrashDisk(crash_at, seed, deaf_to)`; `kinds` says what was done.

    `deaf_to` names a kind of sync that is acknowledged and not done: `extents`, `journal`, `seal`,
    `new file` or `folder`.
    """

    def __init__(self, crash_at: int | None, seed: int, deaf_to: str | None = None) -> None:
        self._crash_at = crash_at
        self._random = random.Random(seed)
        self._deaf_to = deaf_to
        self._lock = threading.RLock()
        self._pending: dict[Path, dict[int, bytes]] = {}
        self._sizes: dict[Path, int] = {}
        self._renamed: dict[Path, tuple[Path, bytes | None]] = {}
        self._records = 0
        self.kinds: list[str] = []
        self.crashed = False

    # Operations

    def _count(self, kind: str) -> None:
        self.kinds.append(kind)
        if self.crashed or len(self.kinds) == self._crash_at:
            self.crashed = True
            raise Crashed("the machine went down")

    def _write_at(self, descriptor, data, offset):
        with self._lock:
            self._count("write")
            self._remember(_path(descriptor), offset, data.nbytes)
            return self._real[0](descriptor, data, offset)

    def _write(self, descriptor, data):
        with self._lock:
            self._count("write")
            self._remember(_path(descriptor), os.lseek(descriptor, 0, os.SEEK_CUR), len(data))
            return self._real[1](descriptor, data)

    def _remember(self, path, offset, size):
        if path.name.endswith(" (deleted)"):
            return  # a crash takes a file without a name whole
        pending = self._pending.setdefault(path, {})
        self._sizes.setdefault(path, path.stat().st_size)
        first = offset // SECTOR * SECTOR
        with path.open("rb") as file:
            file.seek(first)
            old = file.read(offset + size - first + SECTOR)
        for begin in range(first, offset + size, SECTOR):
            pending.setdefault(begin, old[begin - first : begin - first + SECTOR])

    def _sync_data(self, descriptor):
        with self._lock:
            self._count("extents")
            if self._deaf_to != "extents":
                self._forget(_path(descriptor))

    def _sync(self, descriptor):
        with self._lock:
            path = _path(descriptor)
            kind = "folder" if path.is_dir() else "new file"
            if path.name == "journal":
                kind = ("journal", "seal")[self._records % 2]
                self._records += 1
            self._count(kind)
            if self._deaf_to == kind:
                return
            if kind == "folder":
                self._renamed = {p: v for p, v in self._renamed.items() if p.parent != path}
            else:
                self._forget(path)

    def _rename(self, source, target):
        with self._lock:
            self._count("rename")
            source, target = Path(source).resolve(), Path(target).resolve()
            before = target.read_bytes() if target.exists() else None
            self._renamed.setdefault(target, (source, before))
            for table in (self._pending, self._sizes):
                table.pop(target, None)
                if source in table:
                    table[target] = table.pop(source)
            self._real[4](source, target)

    def _forget(self, path):
        self._pending.pop(path, None)
        self._sizes.pop(path, None)

    # The crash

    def lose(self) -> None:
        """Put the files into a state that a crash may have left."""
        for path, sectors in self._pending.items():
            if not path.exists():
                continue
            grown = path.stat().st_size
            with path.open("r+b") as file:
                for begin, old in sectors.items():
                    if self._random.random() < 0.5:
                        file.seek(begin)
                        file.write(old.ljust(min(SECTOR, grown - begin), b"\0"))
                if self._random.random() < 0.25:
                    file.truncate(max(self._sizes[path], self._random.randrange(grown + 1)))
        for target, (_, before) in self._renamed.items():
            if self._random.random() < 0.5:
                if before is None:
                    target.unlink(missing_ok=True)
                else:
                    target.write_bytes(before)

    # In place of the real ones

    def __enter__(self) -> CrashDisk:
        self._real = (medium.write_at, files.write, medium.sync_data, files.sync, os.rename)
        medium.write_at, files.write = self._write_at, self._write
        medium.sync_data, files.sync = self._sync_data, self._sync
        files.os.rename = self._rename
        return self

    def __exit__(self, *_) -> None:
        medium.write_at, files.write, medium.sync_data, files.sync, files.os.rename = self._real


def _path(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
