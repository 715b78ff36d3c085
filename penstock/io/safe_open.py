"""Safe opening of files that another party may have placed: regular files of limited length.

Opening a FIFO blocks without end, a device such as `/dev/zero` never ends, and a file of a few
sectors can claim any length. Files that are read completely are read through this module.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_REFUSALS = {errno.ELOOP: "a link", errno.EISDIR: "a folder", errno.ENXIO: "a socket"}


class NotPlainError(OSError):
    """The path is not a regular file of an acceptable length; `strerror` describes it."""


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file, or the target of a link to one, for unbuffered reading.

    Raises:
        NotPlainError: it is a folder, a FIFO, a device or a socket.
        OSError: it does not exist, or the system refused.
    """
    return os.fdopen(_open(path, os.O_RDONLY), "rb", buffering=0)


def file_in_place(folder: Path) -> Path | None:
    """Return the file that is where a folder, or a folder above it, would be; None without one."""
    found = next((place for place in (folder, *folder.parents) if place.exists()), None)
    return None if found is None or found.is_dir() else found


def open_own(path: Path, flags: int) -> int:
    """Open a file for modification and return its descriptor. Links are not followed, so that only
    the named path can change. Errors are those of `open_plain`."""
    return _open(path, flags | os.O_NOFOLLOW)


def read_plain(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most `most_bytes`; errors as of `open_plain`."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise NotPlainError(
                errno.EFBIG, f"it has {size:,} bytes, at most {most_bytes:,} are allowed", str(path)
            )
        return file.read()


def _open(path: Path, flags: int) -> int:
    try:
        # Non-blocking: opening a FIFO would otherwise wait for a writer.
        file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _REFUSALS:
            raise _not_plain(path, _REFUSALS[error.errno]) from error
        raise
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        raise _not_plain(path, _KINDS.get(stat.S_IFMT(mode), "a folder"))
    return file


def _not_plain(path: Path, what: str) -> NotPlainError:
    return NotPlainError(errno.EINVAL, f"expected a file, got {what}; move it away", str(path))
