"""How the C library gives memory back, for an engine on the CPU.

By default every large tensor is mapped when it is made and unmapped when it dies, so each stage
touches fresh pages that the kernel must find and clear: a tenth of a bf16 step (measured:
`docs/log.md`). An engine makes the same tensors again at every stage, so it keeps the pages.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD_BYTES = 64 << 20
_NEVER = 2**31 - 1


def keep_freed_pages() -> bool:
    """Let glibc serve large tensors from pages it already has; return whether it agreed."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return all(
        mallopt(option, value) == 1
        for option, value in (
            (_M_MMAP_MAX, 0),
            (_M_TRIM_THRESHOLD, _NEVER),
            (_M_TOP_PAD, _TOP_PAD_BYTES),
        )
    )
