"""How many pages of freed tensors the engines on a CPU keep: as many as memory suffices for.

Keeping them saves a step many page faults (`engine/host_memory.py`). The resident memory of the
process is read each time, so that it includes every part: libraries, store and buffers too.
"""

from penstock.engine import keep_freed_pages, map_tensors
from penstock.planning.memory_shares import MemoryShares
from penstock.telemetry import process_memory

_ALL_KEPT_OVER_USED = 1.75
"""Resident bytes of engines that keep all of their pages, relative to the bytes in use: measured
1.5 to 1.7."""


def keep_pages(limit_bytes: int) -> None:
    """Let the C library keep the pages of freed tensors while this process stays below a limit of
    its resident memory. Its engines take turns."""
    keep_freed_pages(lambda: limit_bytes - process_memory.resident_bytes())


def settle_pages(shares: MemoryShares, *, are_at_once: bool) -> None:
    """Let the C library keep the pages of freed tensors if memory suffices, else return them.

    What one of several engines that compute at once adds cannot be told from what another does.
    """
    if not are_at_once:
        keep_pages(shares.limit)
    elif shares.engine_most >= _ALL_KEPT_OVER_USED * shares.engine_host:
        keep_freed_pages()
    else:
        map_tensors()
