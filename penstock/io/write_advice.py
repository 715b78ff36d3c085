"""What a user can do about a write that the system refused, by the kind of the refusal."""

import errno
import resource

_UNLIMITED = resource.RLIM_INFINITY


def write_advice(error: BaseException | None, free_space: str) -> str:
    """Return what to do about a refused write.

    **Arguments:** `free_space` is the advice for a full disk, and for every other refusal.
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
    return free_space
