"""Waiting until bytes and names are on the medium, so that no crash takes them back.

A file's bytes and its name are made durable apart: the bytes by syncing the file, the name by
syncing the folder that it is in. What is to be there whole or not at all is written aside, synced,
and renamed, and then the folder is synced, since without that a crash may undo the rename.
Everything in Penstock that a crash must not cost goes through here, and tests put faults here.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.io import failpoints

TEMPORARY_PREFIX = ".tmp-"
"""Of the names of what is written aside; a crash may leave it behind."""


def sync(descriptor: int) -> None:
    """Wait until a file or folder is on the medium.

    An error is final: the kernel may have dropped the pages, so that a second call would succeed
    with the bytes lost.
    """
    os.fsync(descriptor)


def sync_data(descriptor: int) -> None:
    """Wait until a file's bytes are on the medium, and its size where it has changed."""
    os.fdatasync(descriptor)


def sync_folder(folder: Path) -> None:
    """Make the names inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing; the names of all are durable on return.

    Raises:
        OSError: the system refuses, or something else has the name.
    """
    missing = []
    above = folder
    while not above.exists():
        missing.append(above)
        above = above.parent
    # Each is synced before there is one in it: so the deepest that is there is the only one that a
    # killed process may have left unsynced. Where we may not look we have made none.
    with contextlib.suppress(PermissionError):
        sync_folder(above.parent)
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)
    folder.mkdir(exist_ok=True)


def write(descriptor: int, data: memoryview) -> int:
    """Hand bytes to the operating system and return how many it took; tests put faults here."""
    return os.write(descriptor, data)


def write_all(descriptor: int, data: memoryview) -> None:
    """Hand all of the bytes to the operating system."""
    while len(data):
        data = data[write(descriptor, data) :]


def write_file(path: Path, content: bytes) -> None:
    """Write a small file, which must not exist; its bytes are durable on return."""
    with _new_file(path) as descriptor:
        write_all(descriptor, memoryview(content))
        sync(descriptor)


def put_file(path: Path, content: bytes, point: str | None = None) -> None:
    """As `put_pieces`, of one piece."""
    put_pieces(path, (content,), point)


def put_pieces(path: Path, pieces: Iterable[bytes], point: str | None = None) -> None:
    """Put `pieces`, one after the other, under `path` so that a crash leaves what was there or
    this, never less.

    Args:
        path: in a folder that exists; whatever lies aside, a link too, is replaced.
        pieces: all of the content; they may be read from what is there.
        point: the prefix of the fault points on the way.

    Raises:
        OSError: the system refused; what was there is unchanged, and nothing lies aside.
    """
    temporary = _aside(path)
    temporary.unlink(missing_ok=True)
    try:
        with _new_file(temporary) as descriptor:
            for piece in pieces:
                write_all(descriptor, memoryview(piece))
            _reached(point, "before_sync")
            sync(descriptor)
        _reached(point, "before_rename")
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _reached(point, "after_rename")


def replace_file(path: Path, content: bytes, point: str | None = None) -> None:
    """As `put_file`, and durable on return."""
    put_file(path, content, point)
    sync_folder(path.parent)
    _reached(point, "after_sync")


@contextlib.contextmanager
def new_folder(folder: Path, point: str | None = None) -> Iterator[Path]:
    """Yield an empty folder, which gets its name when the block has ended; durable on return.

    A crash leaves all of it or nothing, and so does a block that fails.

    Args:
        folder: not there, or empty, when the block ends; the folder that it is in exists.
        point: the prefix of the fault points on the way.

    Raises:
        OSError: the system refused.
    """
    temporary = _aside(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary  # each file in it is synced by whoever writes it
        _reached(point, "before_sync")
        sync_folder(temporary)
        _reached(point, "before_rename")
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _reached(point, "after_rename")
    sync_folder(folder.parent)
    _reached(point, "after_sync")


def _aside(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}")


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _reached(point: str | None, place: str) -> None:
    if point is not None:
        failpoints.point(f"{point}.{place}")
