"""What the operating system refuses in places that nobody expects it, said as an error of ours.

What a run stores goes through code that names the file and what to do. This is for the rest: a
system that gives no more memory or threads, a name that it does not take, output to a full disk.
"""

from __future__ import annotations

import errno
import os
import sys

from penstock import process_memory
from penstock.errors import BudgetError, ConfigError, PenstockError, StorageError

# Of libraries, where no class of error says it. PyTorch, Python's threads, the dynamic linker.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "can't start new thread",
    "failed to map segment",
    "cannot allocate memory",
    "unable to mmap",
)


def explain_system_error(error: BaseException) -> PenstockError | None:
    """Return the error to tell the user for one of the system; None for any other."""
    text = str(error)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and _is_memory(error)):
        return _no_memory(text or "an allocation failed")
    if isinstance(error, UnicodeEncodeError):
        return _not_encodable(error)
    if isinstance(error, OSError) and error.errno is not None:
        place = (
            os.fsdecode(error.filename)
            if isinstance(error.filename, str | bytes)
            else "standard output"
        )
        return StorageError(f"{place}: {error.strerror}")
    is_said = any(sign in text.lower() for sign in _OUT_OF_MEMORY)
    if is_said and isinstance(error, (RuntimeError, ImportError)):
        return _no_memory(text.splitlines()[0])
    return None


def _is_memory(error: OSError) -> bool:
    return error.errno == errno.ENOMEM


def _no_memory(what: str) -> BudgetError:
    limit = process_memory.address_space_limit()
    has = "" if limit is None else f" of the {limit:,} that its limit allows (ulimit -v)"
    return BudgetError(
        f"the system gives this process no more memory or threads: {what}; it has "
        f"{process_memory.address_space_bytes():,} bytes of address space{has}; raise the limit, "
        "free memory, or lower `memory` and `engine.threads`"
    )


def _not_encodable(error: UnicodeEncodeError) -> ConfigError | None:
    """Of a name that the locale cannot write; other text is always encoded as UTF-8."""
    encoding = sys.getfilesystemencoding()
    is_name = error.encoding in (encoding, "utf-8") or encoding != "utf-8"
    if not is_name:
        return None
    return ConfigError(
        f"expected names that this system's locale can write ({encoding}), got "
        f"{error.object!a}; set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
    )
