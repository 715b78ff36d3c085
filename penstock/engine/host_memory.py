"""How the C library gives memory back, for an engine on the CPU.

By default every large tensor is mapped when it is made and unmapped when it dies, so each stage
touches fresh pages that the kernel must find and clear: a tenth of a bf16 step (measured:
`docs/decisions.md`). An engine makes the same tensors again at every stage, so it may keep the
pages. Then what is resident is up to two thirds more than what is in use, for want of holes of the
right size. Where memory is short, large tensors go back to the system one by one, and the sum is
exact.
"""

from __future__ import annotations

import ctypes
import sys

KEPT_OVER_USED = 1.75
"""Resident bytes of an engine that keeps its pages, over those in use: 1.5 to 1.7 were measured."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_TOP_PAD_BYTES = 64 << 20
_NEVER = 2**31 - 1
_MAPPED_BYTES = 1 << 20  # of a tensor that is mapped by itself, where pages are returned
_MANY = 65536  # glibc's own limit of mappings


def keep_freed_pages() -> bool:
    """Let glibc serve large tensors from pages it already has; return whether it agreed."""
    return _set((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _TOP_PAD_BYTES))


def return_freed_pages() -> bool:
    """Let glibc give large tensors back as they die, and what it has kept; as above."""
    agreed = _set(
        (_M_MMAP_MAX, _MANY),
        (_M_MMAP_THRESHOLD, _MAPPED_BYTES),
        (_M_TRIM_THRESHOLD, _MAPPED_BYTES),
        (_M_TOP_PAD, 0),
    )
    if agreed:
        ctypes.CDLL(None).malloc_trim(0)
    return agreed


def _set(*options: tuple[int, int]) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return all(mallopt(option, value) == 1 for option, value in options)
