"""How many pages of freed tensors the engines on a CPU keep: as many as memory suffices for.

Keeping them saves a step many page faults (`engine/host_memory.py`). The resident memory of the
process is read each time, so that it includes every part: libraries, store and buffers too. Slabs
that are not touched yet are counted as if they were: the first update of a store in memory touches
all moments.
"""

import time

from penstock.engine import HostMemory, keep_freed_pages, map_tensors
from penstock.kernels.memory import untouched_bytes
from penstock.planning.memory_shares import MemoryShares
from penstock.telemetry import process_memory

_ALL_KEPT_OVER_USED = 1.75
"""Resident bytes of engines that keep all of their pages, relative to the bytes in use: measured
1.5 to 1.7."""
_READING_SHARE = 0.01  # of the time: how much of it may be spent reading which pages are touched


class _Reading:
    """Reads the memory of the process, which has a limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._untouched, self._read_again_at = 0, float("-inf")

    def __call__(self) -> HostMemory:
        begin = time.monotonic()
        if begin >= self._read_again_at:
            self._untouched = untouched_bytes()
            end = time.monotonic()
            self._read_again_at = end + (end - begin) / _READING_SHARE
        resident = process_memory.resident_bytes()
        return HostMemory(resident, self._limit_bytes - resident - self._untouched)


def keep_pages(limit_bytes: int) -> int:
    """Let the C library keep the pages of freed tensors while this process stays below a limit of
    its resident memory; return the number of the setting. Its engines take turns."""
    return keep_freed_pages(_Reading(limit_bytes))


def settle_pages(shares: MemoryShares, *, are_at_once: bool) -> int:
    """Let the C library keep the pages of freed tensors if memory suffices, else return them;
    return the number of the setting, for `end_setting`.

    What one of several engines that compute at once adds cannot be told from what another does.
    """
    if not are_at_once:
        return keep_pages(shares.limit - shares.mask_change)
    if shares.engine_most >= _ALL_KEPT_OVER_USED * shares.engine_host:
        return keep_freed_pages()
    return map_tensors()
