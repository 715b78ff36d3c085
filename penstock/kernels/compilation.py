"""Declaration of compiled kernels, and the location of their machine code.

Numba's on-disk cache is keyed by the time stamp of the file that contains the kernel. A kernel that
inlines functions from another file is *not* recompiled when that file changes. The name of the
cache folder therefore contains a digest of all sources of this package, so that outdated machine
code is never used. `NUMBA_CACHE_DIR` sets the location. By default the code is stored beside the
sources or, if these are read-only, in the user's cache folder.
"""

import functools
import hashlib
import importlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import config as _numba_config

from penstock.user_folders import cache_folder

config: Any = _numba_config  # its attributes are created from the environment


def _source_digest() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder() -> str | None:
    """The first writable folder for compiled code, or None if there is none."""
    places = [Path(__file__).parent / "__pycache__", cache_folder()]
    if config.CACHE_DIR:
        places = [Path(config.CACHE_DIR) / "penstock"]
    for place in places:
        folder = place / f"kernels-{_source_digest()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return str(folder)
    return None


def _threads_may_meet() -> bool:
    """Whether Numba has a thread pool here that two Python threads may use at once."""
    for pool in ("tbbpool", "omppool"):
        try:
            importlib.import_module(f"numba.np.ufunc.{pool}")
        except ImportError:
            continue
        return True
    return False


_FOLDER = _cache_folder()
_THREADS_MAY_MEET = _threads_may_meet()
_ONE_AT_A_TIME = threading.Lock()


def kernel(function: Callable[..., Any], parallel: bool = True) -> Callable[..., Any]:
    """Compile `function` on first use, in parallel over its `prange` and without the GIL.

    No fast-math: operations are compiled as written, and fused multiply-adds are used only where
    named. The function must not allocate Python objects. It may be called from several threads at
    once.
    """
    options: dict[str, Any] = {"parallel": parallel, "nogil": True, "error_model": "numpy"}
    # Numba reads the folder once, while decorating; other users in this process keep their own
    # folder.
    before = config.CACHE_DIR
    config.CACHE_DIR = _FOLDER or before
    try:
        compiled = numba.njit(cache=_FOLDER is not None, **options)(function)
    finally:
        config.CACHE_DIR = before
    return compiled if _THREADS_MAY_MEET else _one_at_a_time(compiled)


serial_kernel = functools.partial(kernel, parallel=False)
"""Decorator for a kernel without `prange`, whose iterations depend on each other."""


def _one_at_a_time(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Numba's fallback pool (`workqueue`) aborts the process when two threads use it at once."""

    @functools.wraps(compiled)
    def call(*arguments: Any) -> Any:
        with _ONE_AT_A_TIME:
            return compiled(*arguments)

    return call


inlined = numba.njit(forceinline=True, nogil=True, error_model="numpy")
"""Decorator for parts of kernels; they are inlined into each kernel's code."""

called = numba.njit(nogil=True, error_model="numpy")
"""Decorator for parts of kernels that are too large to be inlined wherever they are used."""
