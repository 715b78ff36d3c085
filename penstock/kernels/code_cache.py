"""Where the machine code of kernels is kept on disk, and who compiles it.

Numba's own cache is keyed by the path and the time stamp of the file that contains a kernel. A
fresh copy of the sources would be compiled again, and a kernel that inlines functions from another
file would *not* be compiled again when that file changes. Here the key is a digest of all sources
that a kernel may inline: those of this package, and those of the kernel's own folder. Copies of the
same sources share machine code.

`NUMBA_CACHE_DIR` sets the location. By default it is the user's cache folder or, if that is not
writable, the folder of the sources. The processor, the types of the arguments and the versions of
Numba and Python are part of Numba's key.

Only one process compiles a kernel; others that need it meanwhile wait and read its code. A file
that is damaged or cannot be read counts as absent, and code that cannot be written is not kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import io
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import xxhash
from numba.core import caching
from numba.core.runtime import rtsys

from penstock.user_folders import cache_folder

_KERNELS = Path(__file__).parent
_LONGEST_WAIT_SECONDS = 120.0  # a kernel takes a few; a stopped process must not stop others
_POLL_SECONDS = 0.02
_KEPT_VERSIONS = 16
_before_compilation: list[Callable[[], None]] = []


class _Locator(caching._CacheLocator):
    """Where the code of a kernel's folder is."""

    def __init__(self, py_func: Callable[..., Any], py_file: str) -> None:
        self._line = py_func.__code__.co_firstlineno
        self._digest = sources_digest(Path(py_file).parent)
        self._folder = writable_folder(Path(py_file).parent, self._digest)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._digest

    def get_disambiguator(self) -> str:
        return str(self._line)

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator | None:
        locator = cls(py_func, py_file)
        return None if locator._folder is None else locator


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes: list[type[object]] = [_Locator]  # noqa: RUF012  as the base class has it


class _SealedFiles(caching.IndexDataCacheFile):
    """An index and the machine code, each with a checksum of its name and content at its end, which
    unpickling ignores.

    Code files have random numbers: where files have no locks, two processes that save at once would
    give one number to different code.
    """

    def save(self, key: Any, data: Any) -> None:
        """Save the code of a key; the index of a process that saves at once may lose it."""
        overloads = self._load_index()
        name = overloads.setdefault(key, self._data_name(secrets.randbits(64)))
        self._save_data(name, data)
        self._save_index(overloads)

    def _load_index(self) -> dict[Any, str]:
        return super()._load_index() if _is_whole(self._index_path) else {}

    def _load_data(self, name: str) -> Any:
        if not _is_whole(self._data_path(name)):
            raise OSError(f"{name} is absent or damaged")  # Numba compiles then
        return super()._load_data(name)

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[io.BytesIO]:
        content = io.BytesIO()
        yield content
        with super()._open_for_write(filepath) as file:
            file.write(content.getvalue() + _checksum(filepath, content.getvalue()))


def _is_whole(path: str) -> bool:
    try:
        content = Path(path).read_bytes()
    except OSError:
        return False
    size = xxhash.xxh3_128().digest_size
    return content[-size:] == _checksum(path, content[:-size])


def _checksum(path: str, content: bytes) -> bytes:
    """Return the checksum of a file, which is damaged under another name."""
    checksum = xxhash.xxh3_128(Path(path).name.encode() + b"\0")
    checksum.update(content)
    return checksum.digest()


class CodeCache(caching.FunctionCache):
    """The machine code of one kernel, one file for each combination of types."""

    _impl_class = _Implementation

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _SealedFiles(
            cache_path=self.cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=self._impl.locator.get_source_stamp(),
        )
        self._lock = _Lock(Path(self.cache_path) / f"{self._impl.filename_base}.lock")

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code, or nothing if this process is to compile it: `save_overload` is next."""
        self._lock.release()  # of a compilation that failed
        found = self._read(sig, target_context)
        if found is None:
            for function in tuple(_before_compilation):
                function()
            self._lock.acquire()
            found = self._read(sig, target_context)  # another process may have made it
            if found is not None:
                self._lock.release()
        return found

    def _read(self, sig: Any, target_context: Any) -> Any:
        """Return the code if it is kept.

        `FunctionCache.load_overload` first imports all of Numba's implementations (0.5 s), which a
        compilation needs and imports itself. Machine code refers to C functions, to the runtime
        that is initialized here, and to the pool of threads, which it starts.
        """
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)
        return None  # the guard has caught an error

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            with contextlib.suppress(OSError):  # no room, or a quota: others compile it again
                super().save_overload(sig, data)
        finally:
            self._lock.release()


@contextlib.contextmanager
def calling_before_compilation(function: Callable[[], None]) -> Iterator[None]:
    """Call `function` inside the block before each compilation, and before each wait for one of
    another process.

    The calling thread, which may be any, has Numba's lock: `function` must not wait for another.
    """
    _before_compilation.append(function)
    try:
        yield
    finally:
        _before_compilation.remove(function)


def code_folder() -> Path | None:
    """Return the folder for the machine code of this package's kernels; None if none is
    writable."""
    return writable_folder(_KERNELS, sources_digest(_KERNELS))


def code_cache(function: Callable[..., Any]) -> CodeCache | None:
    """Return the machine code of a kernel; None if no folder is writable."""
    sources = Path(inspect.getfile(function)).parent
    return (
        None if writable_folder(sources, sources_digest(sources)) is None else CodeCache(function)
    )


class _Lock:
    """A lock of a file, which ends with the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: int | None = None

    def acquire(self) -> None:
        """Wait for the lock. Without it, which is rare, a kernel is compiled more than once."""
        try:
            self._held = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            end = time.monotonic() + _LONGEST_WAIT_SECONDS
            while not _locks(self._held) and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
        except OSError:  # this file system has no locks, or no room
            self.release()

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._held is not None:
            with contextlib.suppress(OSError):
                # A child that was forked meanwhile shares the open file: closing it would not do.
                fcntl.flock(self._held, fcntl.LOCK_UN)
            os.close(self._held)
            self._held = None


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@functools.cache
def sources_digest(folder: Path) -> str:
    """Return a digest of what the machine code of a folder's kernels depends on."""
    digest = hashlib.sha256(f"{numba.__version__} {folder.name}".encode())
    for place in dict.fromkeys((_KERNELS, folder)):
        for source in sorted(place.glob("*.py")):
            digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:16]


@functools.cache
def writable_folder(sources: Path, digest: str) -> Path | None:
    """Return the first writable folder for machine code, or None if there is none."""
    for place in _places(sources):
        folder = place / digest
        try:
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            if is_new:
                _remove_oldest(place, folder)
            return folder
    return None


def _places(sources: Path) -> Iterator[Path]:
    if configured := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(configured) / "penstock" / "kernels"
        return
    yield cache_folder() / "kernels"
    yield sources / "__pycache__" / "kernels"


def _remove_oldest(place: Path, kept: Path) -> None:
    """Remove the code of versions that have not compiled anything for the longest time."""
    with contextlib.suppress(OSError):  # another process may remove them at the same time
        folders = [folder for folder in place.iterdir() if folder != kept and folder.is_dir()]
        folders.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
        for folder in folders[_KEPT_VERSIONS - 1 :]:
            shutil.rmtree(folder, ignore_errors=True)
