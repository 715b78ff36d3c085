"""Atomic creation of a folder: built under a temporary name, synced, and renamed once.

The temporary folder `.NAME.building` lies beside the final one and is protected by a lock on
itself. The kernel releases the lock when the process dies. The next build therefore recognises a
folder of a killed build and empties it; a folder that is in use causes an error.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.errors import DataError, StorageError
from penstock.io import durable, write_advice


@contextlib.contextmanager
def published_folder(
    out: Path, replaceable: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` at the end of the block, and is removed if the block
    fails.

    Args:
        out: the folder to create, with its parents.
        replaceable: None rejects an existing `out`; otherwise returns whether an existing folder
            may be replaced.

    Raises:
        DataError: `out` exists, or another process is building it.
        StorageError: the operating system refused a write, here or in the block.
    """
    out = Path(os.path.realpath(out))  # a link stays, its target is replaced
    staging = out.with_name(f".{out.name}.building")
    _refuse_existing(out, replaceable)
    with contextlib.ExitStack() as locks:
        try:
            missing = [parent for parent in out.parents if not parent.exists()]
            durable.make_folder(out.parent)
            locks.callback(_remove_empty, missing)
            claimed = _claim(staging, out)
            locks.callback(os.close, claimed)
            held: int | None = claimed
            try:
                yield staging
                durable.sync_folder(staging)
                _refuse_existing(out, replaceable)
                held = _move(staging, out, locks)
                durable.sync_folder(out.parent)
            finally:
                # A failed build or the replaced folder. Another folder of this name is that of
                # another build, which may begin after the move.
                if held is not None and _is_same_file(staging, held):
                    shutil.rmtree(staging, ignore_errors=True)
        except OSError as error:
            advice = write_advice(error, "free some space there or choose another output folder")
            raise StorageError(
                f"cannot write {out}: {error.strerror or error}; nothing was left behind; {advice}"
            ) from error


def _refuse_existing(out: Path, replaceable: Callable[[Path], bool] | None) -> None:
    if not os.path.lexists(out):
        return
    if replaceable is None:
        raise DataError(
            f"{out} exists; choose another output folder, or replace it with --overwrite"
        )
    if not replaceable(out):
        raise DataError(
            f"{out} exists and is not a data set, so --overwrite does not replace it; "
            "choose another output folder or remove it yourself"
        )


def _claim(staging: Path, out: Path) -> int:
    """Create, lock and empty the folder `staging`; return the descriptor that holds the lock."""
    while True:
        with contextlib.suppress(FileExistsError):
            staging.mkdir()
        try:
            lock = _lock(staging)
        except FileNotFoundError:  # its owner has just renamed it
            continue
        except BlockingIOError:
            raise DataError(
                f"another process is building {out} now; wait until it ends, or choose another "
                "folder"
            ) from None
        if _is_same_file(staging, lock):
            for entry in list(os.scandir(staging)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
            return lock
        os.close(lock)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_empty(folders: list[Path]) -> None:
    """Remove `folders`, the deepest first, up to the first that is not empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _move(staging: Path, out: Path, locks: contextlib.ExitStack) -> int | None:
    """Rename `staging` to `out`.

    Returns the lock of the previous folder if that is at `staging` now, else None.
    """
    if not os.path.lexists(out):
        os.rename(staging, out)
        return None
    # The replaced folder is then named `staging`: no other process may lock it before its removal.
    replaced = _lock(out)
    locks.callback(os.close, replaced)
    if _exchange(staging, out):
        return replaced
    old = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    os.rename(out, old)
    os.rename(staging, out)
    shutil.rmtree(old, ignore_errors=True)
    return None


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one atomic operation; return False if the system has no such
    operation."""
    current_directory, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE, see renameat2(2)
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(
        current_directory, os.fsencode(first), current_directory, os.fsencode(second), exchange
    ):
        number = ctypes.get_errno()
        if number in (errno.ENOSYS, errno.EINVAL):  # not supported by the kernel or the file system
            return False
        raise OSError(number, os.strerror(number), str(second))
    return True
