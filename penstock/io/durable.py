"""Durable writes: sync contents and names, so that no crash reverts them.

A file's content and its name are made durable separately: the content by a sync of the file, the
name by a sync of its folder. Data that must appear atomically is written to a temporary name,
synced and renamed. The folder is then synced, since otherwise a crash may undo the rename. All data
in Penstock that must survive a crash is written by this module, and tests inject faults here.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.io import failpoints

TEMPORARY_PREFIX = ".tmp-"
"""Prefix of temporary names; a crash may leave such files behind."""


def sync(descriptor: int) -> None:
    """Sync a file or folder to the medium.

    An error is final: the kernel may have dropped the pages, so that a second call would succeed
    although the bytes are lost.
    """
    os.fsync(descriptor)


def sync_data(descriptor: int) -> None:
    """Sync a file's content to the medium, and its size if it has changed."""
    os.fdatasync(descriptor)


def sync_folder(folder: Path) -> None:
    """Make the names inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents; all names are durable on return.

    Raises:
        OSError: the system refuses, or something else has the name.
    """
    missing = []
    above = folder
    while not above.exists():
        missing.append(above)
        above = above.parent
    # Each folder is synced before it contains another. Only the deepest existing folder can
    # therefore be unsynced after a kill. Folders that we may not read were not created by us.
    with contextlib.suppress(PermissionError):
        sync_folder(above.parent)
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        sync_folder(each.parent)
    folder.mkdir(exist_ok=True)


def write(descriptor: int, data: memoryview) -> int:
    """Write bytes once and return how many the system accepted; tests inject faults here."""
    return os.write(descriptor, data)


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of the bytes."""
    while len(data):
        data = data[write(descriptor, data) :]


def write_file(path: Path, content: bytes) -> None:
    """Write a small new file; its content is durable on return."""
    with _new_file(path) as descriptor:
        write_all(descriptor, memoryview(content))
        sync(descriptor)


def put_file(path: Path, content: bytes, point: str | None = None) -> None:
    """As `put_pieces`, with one piece."""
    put_pieces(path, (content,), point)


def put_pieces(path: Path, pieces: Iterable[bytes], point: str | None = None) -> None:
    """Write `pieces`, one after the other, to `path`; a crash leaves either the old or the new
    content.

    Args:
        path: in a folder that exists; an existing temporary file, or a link, is replaced.
        pieces: the whole content; pieces may be read from the old file.
        point: the prefix of the failpoints on the way.

    Raises:
        OSError: the system refused; the old file is unchanged, and no temporary file remains.
    """
    temporary = _temporary_path(path)
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
    """As `put_file`, and the name is durable on return."""
    put_file(path, content, point)
    sync_folder(path.parent)
    _reached(point, "after_sync")


@contextlib.contextmanager
def new_folder(folder: Path, point: str | None = None) -> Iterator[Path]:
    """Yield an empty folder, which gets its final name at the end of the block; durable on return.

    After a crash, or if the block fails, the folder exists completely or not at all.

    Args:
        folder: missing, or empty, at the end of the block; its parent exists.
        point: the prefix of the failpoints on the way.

    Raises:
        OSError: the system refused.
    """
    temporary = _temporary_path(folder)
    remove_unfinished(folder)
    temporary.mkdir()
    try:
        yield temporary  # the code that writes a file into it syncs the file
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


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process has left of a `new_folder`."""
    shutil.rmtree(_temporary_path(folder), ignore_errors=True)


def _temporary_path(path: Path) -> Path:
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
