"""How the C library returns memory to the system, for an engine on the CPU.

By default every large tensor is mapped at allocation and unmapped when it is freed. Each stage then
touches fresh pages that the kernel must find and clear, which costs a tenth of a bf16 step
(measured: `docs/decisions.md`). An engine allocates the same tensors at every stage, so it may keep
the pages. Resident memory is then up to two thirds more than the memory in use, because of
fragmentation: the first steps leave free places that later steps, whose allocations are equal from
step to step, do not use again. So free pages are returned after 1, 2, 4, 8, ... steps. If memory is
short, large tensors are returned to the system one by one, and the account is exact.
"""

import ctypes
import sys

KEPT_OVER_USED = 1.75
"""Resident bytes of an engine that keeps its pages, relative to the bytes in use: measured 1.5 to
1.7 without `return_unused_pages`, which the first step still needs."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_TOP_PAD_BYTES = 64 << 20
_NEVER = 2**31 - 1
_MAPPED_BYTES = 1 << 20  # size of a tensor that gets its own mapping, if pages are returned
_MANY = 65536  # glibc's own limit of mappings


def keep_freed_pages() -> bool:
    """Let glibc reuse its pages for large tensors; return whether it accepted the setting."""
    return _set((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _TOP_PAD_BYTES))


def return_freed_pages() -> bool:
    """Let glibc return large tensors when they are freed, and return its free pages; as above."""
    agreed = _set(
        (_M_MMAP_MAX, _MANY),
        (_M_MMAP_THRESHOLD, _MAPPED_BYTES),
        (_M_TRIM_THRESHOLD, _MAPPED_BYTES),
        (_M_TOP_PAD, 0),
    )
    if agreed:
        ctypes.CDLL(None).malloc_trim(0)
    return agreed


def return_unused_pages(steps: int) -> None:
    """Return the free pages of this process, if the number of its steps is a power of two.

    Called between two training steps. The next step touches again those that it uses (measured:
    0.1 s for 0.9 GB). What the first steps alone have used stays with the system.
    """
    if steps > 0 and not steps & (steps - 1):
        return_free_pages()


def return_free_pages() -> None:
    """Return the free pages of this process to the system, if the C library is glibc."""
    if not _is_linux():
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _is_linux() -> bool:
    return sys.platform.startswith("linux")


def _set(*options: tuple[int, int]) -> bool:
    if not _is_linux():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return all(mallopt(option, value) == 1 for option, value in options)
