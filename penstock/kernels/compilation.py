"""Declaration of compiled kernels."""

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any

import numba

from penstock.kernels.code_cache import code_cache

# The pools of which Numba takes the first that it can load, by what NUMBA_THREADING_LAYER asks for.
_POOLS = {"safe": ("tbb",), "threadsafe": ("tbb", "omp"), "forksafe": ("tbb", "workqueue")}


def _threads_may_meet() -> bool:
    """Whether two Python threads may use Numba's thread pool at once: any but `workqueue`."""
    config: Any = numba.config
    layer, default = str(config.THREADING_LAYER).lower(), config.THREADING_LAYER_PRIORITY
    for pool in default if layer == "default" else _POOLS.get(layer, (layer,)):
        if pool == "workqueue":
            break
        try:
            importlib.import_module(f"numba.np.ufunc.{pool}pool")
        except ImportError:
            continue
        return True
    return False


_THREADS_MAY_MEET = _threads_may_meet()
_ONE_AT_A_TIME = threading.Lock()


def kernel(function: Callable[..., Any], parallel: bool = True) -> Callable[..., Any]:
    """Compile `function` on first use, in parallel over its `prange` and without the GIL.

    No fast-math: operations are compiled as written, and fused multiply-adds are used only where
    named. The function must not allocate Python objects. It may be called from several threads at
    once.
    """
    compiled: Any = numba.njit(parallel=parallel, nogil=True, error_model="numpy")(function)
    if (cache := code_cache(function)) is not None:
        compiled._cache = cache  # as `cache=True` does, with Numba's own
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
