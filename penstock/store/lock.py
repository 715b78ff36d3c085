"""One writer per folder: a lock that is released when its process ends, for any reason."""

import fcntl
import os
from pathlib import Path

from penstock.errors import StorageError
from penstock.io import NotPlainError, durable, open_own
from penstock.store import files

_PROCESS = "process "


class FolderLock:
    """Prevents all other writers, in this process or another, from writing into a folder.

    Args:
        folder: created if missing; the file `name` in it names the owning process.
        key: the configuration key of the folder.

    Raises:
        StorageError: another writer has the lock, or the disk is full, read-only or failing.
    """

    def __init__(self, folder: Path, key: str, name: str = "LOCK") -> None:
        if folder.exists() and not folder.is_dir():
            raise StorageError(f"{folder}: expected a folder, got a file; choose another {key}")
        try:
            durable.make_folder(folder)
            self._descriptor = open_own(folder / name, os.O_RDWR | os.O_CREAT)
        except NotPlainError as error:
            raise StorageError(f"{folder / name}: {error.strerror}") from error
        except OSError as error:
            what = "cannot be written" if folder.is_dir() else "this folder cannot be made"
            advice = "make it writable, or choose" if folder.is_dir() else "choose"
            raise StorageError(
                f"{folder}: {what}: {error.strerror}; {advice} another {key}"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise StorageError(f"{folder} is in use{_holder(text)}") from error
        self._owner = os.getpid()
        name_bytes = f"{_PROCESS}{self._owner}\n".encode()
        try:
            with files.storage_errors(folder / name, len(name_bytes)):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, name_bytes, 0)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock; releasing twice is allowed.

        A forked child shares the open file. The lock is the parent's: it ends when the parent
        releases it, and not before.
        """
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            if os.getpid() == self._owner:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _holder(text: str) -> str:
    """Return who has the lock and what to do, from the text in the locked file."""
    if not text:
        return "; wait until it ends, or stop it"
    number = text.removeprefix(_PROCESS)
    if number.isdecimal() and not _runs(int(number)):
        return (
            f": {text} took the lock and has ended, or is on another host; a process that it "
            "forked may have it, so stop that one"
        )
    return f" by {text}; wait until it ends, or stop it"


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True
