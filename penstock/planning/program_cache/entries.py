"""The files of the cache: one for each program in `programs` of the user's cache folder, for each
outline of a program in `outlines`, for each model in `models`, with its programs' keys and the
memory of the libraries, and for each choice of sparse products in `products`.

A file has a checksum of its content and of its name, so damaged files and renamed files are
recognised, removed, and written anew. Several processes may write the same entry at once: each
writes a temporary file and renames it. Nothing is synced, since a file that a crash has torn fails
its checksum. An error of the system (a full disk, a folder that is read-only) means that nothing
is cached.
"""

import contextlib
import hashlib
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Literal

from penstock.io import durable, read_plain
from penstock.user_folders import cache_folder

Kind = Literal["programs", "outlines", "models", "products"]

MOST_BYTES = 1 << 30
"""Of all entries of a folder; beyond that, the least recently used ones are removed."""
_MOST_ENTRY_BYTES = 256 << 20
_MAGIC = b"penstock program 1\n"
_CHECKSUM_BYTES = 32
_STALE_SECONDS = 3600  # a temporary file of this age was left by a process that was killed


def folder(kind: Kind = "programs") -> Path:
    """Return the folder of the entries of a kind. It may not exist yet."""
    return cache_folder() / kind


def read_entry(key: str, kind: Kind = "programs") -> memoryview | None:
    """Return the content of an entry; None if there is none. A damaged entry is removed."""
    path = folder(kind) / key
    try:
        if not _is_own(path):
            return None
        data = read_plain(path, _MOST_ENTRY_BYTES)
    except OSError:
        return None
    with contextlib.suppress(OSError):  # the folder may be read-only
        os.utime(path)  # used now
    begin = len(_MAGIC) + _CHECKSUM_BYTES
    content = memoryview(data)[begin:]
    if data[:begin] != _MAGIC + _checksum(key, content):
        remove_entry(key, kind)
        return None
    return content


def write_entry(key: str, content: bytes, kind: Kind = "programs") -> None:
    """Write an entry, and remove the least recently used ones beyond the cache's size."""
    size = len(_MAGIC) + _CHECKSUM_BYTES + len(content)
    if size > _MOST_ENTRY_BYTES:
        return
    path = folder(kind) / key
    temporary = path.with_name(f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(8)}-{key}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(_MAGIC + _checksum(key, memoryview(content)))
                file.write(content)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        _remove_oldest(path.parent)


def remove_entry(key: str, kind: Kind = "programs") -> None:
    """Remove an entry, if there is one."""
    with contextlib.suppress(OSError):
        (folder(kind) / key).unlink()


def remove_entries(kind: Kind) -> None:
    """Remove all entries of a kind."""
    with contextlib.suppress(OSError):
        for path in list(folder(kind).iterdir()):
            remove_entry(path.name, kind)


def _is_own(path: Path) -> bool:
    """Whether a file belongs to the user of this process; entries of others are not trusted."""
    return os.lstat(path).st_uid == os.geteuid()


def _checksum(key: str, content: memoryview) -> bytes:
    digest = hashlib.blake2b(key.encode(), digest_size=_CHECKSUM_BYTES)
    digest.update(content)
    return digest.digest()


def _remove_oldest(entries: Path) -> None:
    """Remove temporary files that nobody writes, and the oldest entries beyond the limit."""
    now, found = time.time(), []
    with os.scandir(entries) as each:
        for entry in each:
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                continue
            if not entry.name.startswith(durable.TEMPORARY_PREFIX):
                found.append((status.st_mtime, status.st_size, entry.path))
            elif now - status.st_mtime > _STALE_SECONDS:
                os.unlink(entry.path)
    excess = sum(size for _, size, _ in found) - MOST_BYTES
    for _, size, path in sorted(found):
        if excess <= 0:
            break
        with contextlib.suppress(FileNotFoundError):  # another process removes entries too
            os.unlink(path)
        excess -= size
