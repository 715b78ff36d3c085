"""Converts unexpected errors of the operating system into errors of Penstock.

Code that stores data of a run names the file and the next action itself. This module handles the
other cases: no more memory or threads, a rejected file name, output to a full disk.
"""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import BudgetError, ConfigError, PenstockError, StorageError
from penstock.io import write_advice
from penstock.telemetry import process_memory

_TORCH_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# Messages of libraries that have no error class of their own: PyTorch, Python's threads, the
# dynamic linker.
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
    if isinstance(error, UnicodeEncodeError) and sys.getfilesystemencoding() != "utf-8":
        return _beyond_locale(error.object)
    if isinstance(error, OSError) and error.errno is not None:
        return _refused(error)
    is_memory_message = any(sign in text.lower() for sign in _OUT_OF_MEMORY)
    if is_memory_message and isinstance(error, (RuntimeError, ImportError)):
        return _no_memory(text.splitlines()[0])
    return None


def _is_memory(error: OSError) -> bool:
    return error.errno == errno.ENOMEM


def _refused(error: OSError) -> PenstockError:
    if isinstance(error.filename, str | bytes):
        name = os.fsdecode(error.filename)
        cache = os.environ.get(_TORCH_CACHE)
        if cache is not None and Path(name).is_relative_to(cache):
            return ConfigError(
                f"{_TORCH_CACHE}: expected a folder that can be created and written, got {cache}: "
                f"{error.strerror}; choose another folder, or unset the variable"
            )
        return StorageError(f"{name}: {_with_limit(error)}")
    is_output = error.errno in (errno.ENOSPC, errno.EIO, errno.EPIPE, errno.EFBIG)
    return StorageError(f"{'standard output: ' * is_output}{_with_limit(error)}")


def _with_limit(error: OSError) -> str:
    """Return the text of an error, with the advice for a limit of a file's size."""
    advice = write_advice(error, "")
    return f"{error.strerror}; {advice}" if error.errno == errno.EFBIG else f"{error.strerror}"


def refuse_unreadable_arguments(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for an argument with characters that the locale lacks.

    Python represents them as surrogates, which no written file could contain.
    """
    encoding = sys.getfilesystemencoding()
    for text in arguments if encoding != "utf-8" else ():
        if any("\ud800" <= character <= "\udfff" for character in text):
            shown = os.fsencode(text).decode(errors="backslashreplace")
            raise _beyond_locale(shown)


def _beyond_locale(text: str) -> ConfigError:
    return ConfigError(
        "expected arguments in the encoding of this system's locale "
        f"({sys.getfilesystemencoding()}), got {text!a}; set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
    )


def _no_memory(what: str) -> BudgetError:
    limit = process_memory.address_space_limit()
    has = "" if limit is None else f" of a limit of {limit:,} (ulimit -v)"
    return BudgetError(
        f"the system gives this process no more memory or threads: {what}; it has "
        f"{process_memory.address_space_bytes():,} bytes of address space{has}; raise the limit, "
        "free memory, or lower `memory` and `engine.threads`"
    )
