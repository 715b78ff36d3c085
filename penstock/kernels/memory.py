"""The memory of slabs: anonymous, of exact size in pages, on huge pages if available.

A pass over hundreds of megabytes on 4 KiB pages spends much of its time in address translation, so
every whole 2 MiB of a slab requests a huge page. The part after the last whole 2 MiB stays on small
pages: a slab never occupies more than its size rounded up to one small page.
"""

import contextlib
import ctypes
import mmap
import sys
import threading
import weakref

import numpy as np

from penstock.errors import BudgetError

HUGE_PAGE_BYTES = 2 * 1024 * 1024

# The owners of all slabs, by address and size.
_slabs: weakref.WeakValueDictionary[tuple[int, int], np.ndarray] = weakref.WeakValueDictionary()
_slabs_lock = threading.RLock()  # the garbage collector may run code that allocates


def allocate(size_bytes: int) -> np.ndarray:
    """Return `size_bytes` zeroed bytes that begin at a multiple of 2 MiB.

    Args:
        size_bytes: how many bytes, 0 or more.

    Returns:
        uint8 array `[size_bytes]`; its memory is returned to the system with its last view. Pages
        are allocated at first touch.

    Raises:
        BudgetError: the operating system cannot allocate it.
    """
    if size_bytes < 0:
        raise ValueError(f"allocate: expected a size of 0 bytes or more, got {size_bytes}")
    if size_bytes == 0:
        return np.zeros(0, np.uint8)
    # The slack for alignment is only address space: it is never touched.
    length = size_bytes + HUGE_PAGE_BYTES
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            region = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            region = mmap.mmap(-1, length)
    except (OSError, OverflowError) as error:
        raise BudgetError(
            f"the operating system refused {size_bytes} bytes "
            f"({size_bytes / 2**30:.1f} GiB) of memory: {error}; "
            "lower the budget in the configuration or close other programs"
        ) from error
    everything = np.frombuffer(region, np.uint8)
    start = -everything.ctypes.data % HUGE_PAGE_BYTES
    with _slabs_lock:
        _slabs[everything.ctypes.data + start, size_bytes] = everything
    whole = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            region.madvise(mmap.MADV_HUGEPAGE, start, whole)
        except OSError:
            # A kernel without huge pages: the slab has the same content, and passes are slower.
            return everything[start : start + size_bytes]
    return everything[start : start + size_bytes]


def untouched_bytes() -> int:
    """Return the bytes of all slabs that have no page in memory: not touched yet, or swapped out.

    A page that was read and never written counts as touched. 0 if the system does not tell (Linux
    does, by mincore).
    """
    if not sys.platform.startswith("linux"):
        return 0
    mincore, total = ctypes.CDLL(None).mincore, 0
    with _slabs_lock:
        slabs = list(_slabs.items())  # which keeps them until the end
    for (address, size), _ in slabs:
        pages = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
        found = mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        if found == 0:
            total += (len(pages) - int(np.count_nonzero(pages & 1))) * mmap.PAGESIZE
    return total


def page_lock(memory: np.ndarray) -> bool:
    """Page-lock a slab, so that a CUDA device copies from and to it directly.

    A copy from pageable memory goes through a buffer of the driver and blocks the calling thread.
    The pages are unlocked when the slab's last view is gone.

    Args:
        memory: a whole result of `allocate`.

    Returns:
        Whether the pages are locked; False if there is no CUDA device, or the system refuses.
    """
    import torch

    if not torch.cuda.is_available():
        return False
    if memory.nbytes == 0:
        return True
    runtime = torch.cuda.cudart()
    address = memory.ctypes.data
    portable = 1  # for all devices of the process, not only the current one
    if int(runtime.cudaHostRegister(address, memory.nbytes, portable)) != 0:
        # The runtime stores the refusal and would report it with the next kernel; this kernel
        # clears it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)
        return False
    owner = memory
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    unlock = weakref.finalize(owner, runtime.cudaHostUnregister, address)
    unlock.atexit = False  # the device is already closed; the system unlocks the pages
    return True


def cache_lines(count: int, dtype: type[np.generic]) -> np.ndarray:
    """Return memory for `count` numbers that begins with a cache line: no vector lies in two."""
    itemsize = np.dtype(dtype).itemsize
    memory = np.empty(count + 64 // itemsize, dtype)
    first = -memory.ctypes.data % 64 // itemsize
    return memory[first : first + count]
