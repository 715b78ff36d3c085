"""A disk that loses, on a crash, any part of what was not synced: bytes, sizes and names.

Everything goes to real files below one folder. What is on the medium is kept beside them: a file's
bytes as of its last sync, a folder's names as of its own. A crash ends the process's writing at a
chosen operation. What is found then is a random mixture of the two, sector by sector of a file and
name by name of a folder: writes are dropped, kept out of order or torn; files and folders that were
made are gone, those that were deleted are back, and a file may have any length in between.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import threading
from pathlib import Path
from typing import Literal

import numpy as np
from sync_sites import site_chain

SECTOR = 512
SYNCS = ("fsync", "fdatasync")
CHANGES = ("write", "pwrite", "rename", "replace", "unlink", "mkdir", "rmdir")


class Crashed(OSError):
    """What the process meets when its machine goes down; nothing it does after that counts."""


class CrashDisk:
    """Install with `with CrashDisk(root)`; what is in `root` then is on the medium.

    Args:
        root: the folder on the disk, which is there itself.
        crash_at: the operation, counted from 1, that is the first to fail; None for none.
        seed: of what is lost.
        deaf_to: a sync that is acknowledged and not done, by its place in the code.
        losing: on a crash, of what was not synced: a part of it, as the seed says; all of it; or
            only what the missed sync should have kept, as if the rest had got there first.

    `operations` says what was done: the name of the call, or of a sync its place in the code.
    """

    def __init__(
        self,
        root: Path,
        crash_at: int | None = None,
        seed: int = 0,
        deaf_to: str | None = None,
        losing: Literal["anything", "all", "missed"] = "anything",
    ) -> None:
        self.root = root.resolve()
        self.operations: list[str] = []
        self.crashed = False
        self._crash_at, self._deaf_to, self._losing = crash_at, deaf_to, losing
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._bytes: dict[int, bytes] = {}  # on the medium, by inode
        self._names: dict[int, dict[str, int]] = {}
        # What the missed sync was to settle, as it was then.
        self._missed_bytes: dict[int, bytes] = {}
        self._missed_names: dict[int, dict[str, int]] = {}
        self._held: dict[int, int] = {}  # descriptors: so that no inode's number is used again
        self._after: dict[str, object] | None = None

    # Operations

    def _counted(self, name):
        real = getattr(os, name)

        def call(where, *rest, **options):
            if not self._is_here(where, options.get("dir_fd") or options.get("src_dir_fd")):
                return real(where, *rest, **options)
            with self._lock:
                self._count(name)
                return real(where, *rest, **options)

        return call

    def _sync(self, name):
        real = getattr(os, name)

        def call(descriptor):
            if not self._is_here(descriptor, None):
                return real(descriptor)
            with self._lock:
                chain = site_chain()
                self._count(chain)
                if chain != self._deaf_to:
                    self._settle(descriptor, self._bytes, self._names)
                    self._missed_bytes.pop(os.fstat(descriptor).st_ino, None)
                    self._missed_names.pop(os.fstat(descriptor).st_ino, None)
                else:
                    self._settle(descriptor, self._missed_bytes, self._missed_names)

        return call

    def _count(self, what: str) -> None:
        self.operations.append(what)
        if len(self.operations) == self._crash_at:
            self.crashed = True
            self._after = self._image()
        if self.crashed:
            raise Crashed("the machine went down")

    def _is_here(self, where, folder) -> bool:
        if isinstance(where, int):
            path = os.readlink(f"/proc/self/fd/{where}")
        else:
            above = os.getcwd() if folder is None else os.readlink(f"/proc/self/fd/{folder}")
            path = os.path.join(above, os.fspath(where))
        return path.startswith(f"{self.root}/") or path == str(self.root)

    # What is on the medium

    def _settle(self, descriptor, all_bytes, all_names) -> None:
        """Note a file's bytes, or a folder's names, as what is on the medium or is missed."""
        path = f"/proc/self/fd/{descriptor}"
        inode = self._hold(path)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            all_names[inode] = {n: self._hold(f"{path}/{n}") for n in os.listdir(path)}
        else:
            all_bytes[inode] = _content(self._held[inode])

    def _hold(self, path: str) -> int:
        inode = os.stat(path).st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def _settle_all(self, folder: str) -> None:
        for entry in [folder, *(each.path for each in os.scandir(folder))]:
            if entry != folder and os.path.isdir(entry):
                self._settle_all(entry)
                continue
            descriptor = os.open(entry, os.O_RDONLY)
            self._settle(descriptor, self._bytes, self._names)
            os.close(descriptor)

    # The crash

    def _image(self) -> dict[str, object]:
        """Return what a crash leaves now: of every folder the names, of every file the bytes."""
        return self._folder_after(os.stat(self.root).st_ino, str(self.root))

    def _folder_after(self, inode: int, path: str | None) -> dict[str, object]:
        now = {} if path is None else {e.name: e.inode() for e in os.scandir(path)}
        before = self._names.get(inode, {})
        missed = self._missed_names.get(inode, before)
        found: dict[str, object] = {}
        for name in sorted(now.keys() | before.keys()):
            options = before.get(name), now.get(name)
            is_missed = before.get(name) != missed.get(name) == now.get(name)
            chosen = options[self._survives(self._share(), is_missed)]
            if chosen is None:
                continue
            here = f"{path}/{name}" if now.get(name) == chosen else self._path_of(chosen)
            if stat.S_ISDIR(os.stat(here or self._held[chosen]).st_mode):
                found[name] = self._folder_after(chosen, here)
            else:
                found[name] = self._file_after(chosen, here)
        return found

    def _survives(self, share: float, is_missed: bool) -> bool:
        if self._losing == "anything":
            return self._random.random() < share
        return self._losing == "missed" and not is_missed

    def _share(self) -> float:
        """Return how much of one file, or how likely a name, survives what leaves it to chance."""
        return self._random.choice((0.0, 0.5, 0.9))

    def _path_of(self, inode: int) -> str | None:
        """Return where an inode is now, if it has a name."""
        path = os.readlink(f"/proc/self/fd/{self._held[inode]}")
        return path if os.path.exists(path) and os.stat(path).st_ino == inode else None

    def _file_after(self, inode: int, path: str | None) -> bytes:
        descriptor = self._held[inode] if path is None else os.open(path, os.O_RDONLY)
        now, before = _content(descriptor), self._bytes.get(inode, b"")
        if path is not None:
            os.close(descriptor)
        if now == before:
            return now
        missed = self._missed_bytes.get(inode, before)
        count = -(-max(len(now), len(before), len(missed)) // SECTOR)
        old, seen, new = (_sectors(content, count) for content in (before, missed, now))
        is_missed = (old != seen).any(axis=1) & (seen == new).all(axis=1)
        share, mixed = self._share(), old.copy()
        for number in np.flatnonzero((old != new).any(axis=1)):
            if self._survives(share, bool(is_missed[number])):
                mixed[number] = new[number]
        return mixed.tobytes()[: self._size_after(len(before), len(missed), len(now))]

    def _size_after(self, before: int, missed: int, now: int) -> int:
        if self._losing != "anything":
            return now if self._survives(0.0, before != missed == now) else before
        return self._random.choice((now, now, before, self._random.randint(*sorted((before, now)))))

    def lose(self) -> None:
        """Leave, of the files, what the crash has left: the one that was met, or one now."""
        after = self._image() if self._after is None else self._after
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _restore(self.root, after)
        self._forget()

    def _forget(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held, self._names, self._bytes, self._after = {}, {}, {}, None
        self._missed_names, self._missed_bytes = {}, {}

    # In place of the real ones

    def __enter__(self) -> CrashDisk:
        self._real = {name: getattr(os, name) for name in (*SYNCS, *CHANGES)}
        if not self._names:
            self._settle_all(str(self.root))
        for name in CHANGES:
            setattr(os, name, self._counted(name))
        for name in SYNCS:
            setattr(os, name, self._sync(name))
        return self

    def __exit__(self, *_) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def go_on(self, crash_at: int | None) -> None:
        """The process was killed, the machine was not: another process goes on, not synced."""
        self.operations, self.crashed, self._after = [], False, None
        self._crash_at = crash_at


def _content(descriptor: int) -> bytes:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0) if size else b""


def _sectors(content: bytes, count: int) -> np.ndarray:
    padded = content.ljust(count * SECTOR, b"\0")
    return np.frombuffer(padded, np.uint8).reshape(count, SECTOR)  # [sectors, bytes]


def _restore(folder: Path, image: dict[str, object]) -> None:
    for name, what in image.items():
        if isinstance(what, bytes):
            (folder / name).write_bytes(what)
        else:
            (folder / name).mkdir()
            _restore(folder / name, what)
