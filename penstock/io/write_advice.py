"""What a user can do about a write that the system refused, by the kind of the refusal."""

import errno
import resource

_UNLIMITED = resource.RLIM_INFINITY


def is_full(error: BaseException | None) -> bool:
    """Return whether a write was refused because the disk, or a quota of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_advice(
    error: BaseException | None, free_space: str, otherwise: str = "choose another folder"
) -> str:
    """Return what to do about a refused write.

    **Arguments:** `free_space` is the advice for a full disk, and for an error that is none of the
    operating system; `otherwise` is that for a refusal of the system with no advice of its own.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "make the folder writable or choose another folder"
    if number == errno.EIO:
        return "check the disk"
    if number == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit == _UNLIMITED:
            return "its file system holds no file of this size; choose a folder on another one"
        return f"raise the limit of {limit:,} bytes for a file of this process (ulimit -f)"
    return free_space if number is None or is_full(error) else otherwise
