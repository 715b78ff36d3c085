"""Waiting until bytes and names are on the medium, so that no crash takes them back.

A file's bytes and its name are made durable apart: the bytes by syncing the file, the name by
syncing the folder that it is in. Everything in Penstock that a crash must not cost goes through
here, and tests put faults here.
"""

import contextlib
import os
from pathlib import Path


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
