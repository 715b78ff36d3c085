"""How the C library returns memory to the system, for an engine on the CPU.

If every large tensor is mapped at allocation and unmapped when it is freed, each stage touches
fresh pages that the kernel must find and clear, which costs 16 to 28 % of a step (measured:
`docs/decisions.md`). So the pages of freed tensors are kept. The resident memory of an engine that
keeps all of them was 1.5 to 1.7 times the memory in use: the first steps leave free places that
later steps, whose allocations are equal from step to step, do not use again. So free pages are
returned after 1, 2, 4, 8, ... steps, and, if the process has a memory limit, before a call for
which there may be no room beside them. A call that may exceed the limit even then maps those of its
tensors that fit into no free place of the heap.
"""

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

KEPT_OVER_USED = 1.25
"""Memory that a plan gives an engine and its free pages, relative to the memory in use, where it is
taken from another part. With 1.25 the limit made an engine return its free pages 3 times in 7
steps, and 6 times with 1.0 (GPT-2 124M, bf16, AMD Zen 5)."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_M_ARENA_MAX = -8
_TOP_PAD_BYTES = 64 << 20
_NEVER = 2**31 - 1
_MAPPED_BYTES = 1 << 20  # size of a tensor that gets its own mapping, if pages are returned
_MANY = 65536  # glibc's own limit of mappings
_SMALL_BYTES = 1 << 20  # of a call for which the memory of the process is not read

# What glibc's own thresholds grow to in a process that has freed a large mapping. They do not grow
# once they have been set.
_DEFAULT_OPTIONS = (
    (_M_MMAP_MAX, _MANY),
    (_M_MMAP_THRESHOLD, 32 << 20),
    (_M_TRIM_THRESHOLD, 64 << 20),
    (_M_TOP_PAD, 128 << 10),
)

_limit: "_Limit | None" = None  # of this process, if it keeps pages and has a limit
_are_kept = False
_setting = 0  # the number of the latest setting; 0 where there was none


class _Call(NamedTuple):
    """A call that has begun: its bytes, and the room, returns and steps before it."""

    size: int
    room: int
    is_after_return: bool
    returns: int
    steps: int


class _Limit:
    """Decides before each call whether free pages are returned, and whether the call keeps pages.

    A call may add more to the resident memory than it needs at once, measured up to 1.83 times:
    what it frees leaves places that are too small for its next tensors. So what calls add after a
    return of pages is observed. A call of a size that an earlier step has computed since then finds
    its places, and is expected to add little. Calls of one size are taken for the same executable.
    """

    def __init__(self, room_bytes: Callable[[], int]) -> None:
        self.returns = self.steps = 0
        self._room_bytes = room_bytes
        self._added: dict[int, tuple[int, int, int]] = {}  # by size: bytes, returns, steps
        self._added_after_return: dict[int, int] = {}
        self._call: _Call | None = None

    def begin(self, size_bytes: int) -> None:
        """Prepare a call."""
        room = self._room_bytes()
        self._observe(room)
        expected = self._expected(size_bytes)
        is_after_return = expected > room
        if is_after_return:
            return_free_pages()
            room, expected = self._room_bytes(), self._expected_after_return(size_bytes)
        keeps = expected <= room
        if keeps and not _are_kept:
            _keep()
        elif _are_kept and not keeps:
            _map_tensors()
        self._call = _Call(size_bytes, room, is_after_return, self.returns, self.steps)

    def _expected(self, size_bytes: int) -> int:
        added, returns, steps = self._added.get(size_bytes, (0, -1, 0))
        if returns != self.returns:
            return self._expected_after_return(size_bytes)
        return size_bytes // 8 + (0 if steps < self.steps else added)

    def _expected_after_return(self, size_bytes: int) -> int:
        return self._added_after_return.get(size_bytes, 2 * size_bytes)

    def _observe(self, room: int) -> None:
        """Note what the call before has added, if it kept pages."""
        call = self._call
        if call is None or not _are_kept:
            return
        added = max(0, call.room - room)
        self._added[call.size] = added, call.returns, call.steps
        if call.is_after_return:
            known = self._added_after_return.get(call.size, 0)
            self._added_after_return[call.size] = max(
                call.size, added + added // 8, known - known // 8
            )


def keep_freed_pages(room_bytes: Callable[[], int] | None = None) -> bool:
    """Let glibc reuse its pages for large tensors; return whether it accepted the setting.

    The setting, of which the latest counts, is that of the whole process. `room_bytes` returns the
    number of bytes by which the resident memory of the process may grow; by default it has no
    limit.
    """
    global _limit, _setting
    _setting += 1
    is_accepted = _keep()
    _limit = _Limit(room_bytes) if is_accepted and room_bytes is not None else None
    return is_accepted


def map_tensors() -> None:
    """Let glibc return large tensors when they are freed, and return its free pages.

    Memory is then what tensors need, but for those that fit into free places of the heap.
    """
    global _limit, _setting
    _setting += 1
    _limit = None
    if _map_tensors():
        return_free_pages()


def current_setting() -> int:
    """Return the number of the latest setting of this process, for `end_setting`."""
    return _setting


def end_setting(setting: int) -> None:
    """Restore glibc's defaults and return free pages, unless there was a later setting, or none."""
    global _are_kept, _limit
    if setting == 0 or setting != _setting:
        return
    _are_kept, _limit = False, None
    if _set(*_DEFAULT_OPTIONS):
        return_free_pages()


@contextlib.contextmanager
def freed_pages_kept() -> Iterator[None]:
    """Keep freed pages without a limit, and restore the setting at the end."""
    global _limit, _setting
    before, were_kept, limit = _setting, _are_kept, _limit
    keep_freed_pages()
    try:
        yield
    finally:
        if before == 0:
            end_setting(_setting)
        elif were_kept or limit is not None:
            _keep()
        else:
            map_tensors()
        _setting, _limit = before, limit


def begin_call(size_bytes: int) -> None:
    """Prepare a call of an engine on the CPU that needs so many bytes at once.

    If the process has a memory limit, free pages are returned if there may be no room beside them.
    """
    if _limit is not None and size_bytes >= _SMALL_BYTES:
        _limit.begin(size_bytes)


def share_one_heap() -> bool:
    """Let all threads allocate in one heap; return whether the C library accepted the setting.

    By default a thread other than the main one gets heaps of 64 MiB, and glibc maps and unmaps its
    larger tensors one by one. Called before threads are started.
    """
    return _set((_M_ARENA_MAX, 1))


def return_unused_pages(steps: int) -> None:
    """Begin a step: return the free pages of this process, if its earlier steps are a power of two.

    The next step touches again those that it uses (measured: 0.1 s for 0.9 GB). What the first
    steps alone have used stays with the system.
    """
    if steps > 0 and not steps & (steps - 1):
        return_free_pages()
    if _limit is not None:
        _limit.steps += 1


def return_free_pages() -> None:
    """Return the free pages of this process to the system, if the C library is glibc."""
    if _limit is not None:
        _limit.returns += 1
    if not _is_linux():
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _keep() -> bool:
    global _are_kept
    _are_kept = _set((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _TOP_PAD_BYTES))
    return _are_kept


def _map_tensors() -> bool:
    global _are_kept
    _are_kept = False
    return _set(
        (_M_MMAP_MAX, _MANY),
        (_M_MMAP_THRESHOLD, _MAPPED_BYTES),
        (_M_TRIM_THRESHOLD, _MAPPED_BYTES),
        (_M_TOP_PAD, 0),
    )


def _is_linux() -> bool:
    return sys.platform.startswith("linux")


def _set(*options: tuple[int, int]) -> bool:
    if not _is_linux():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    return all(mallopt(option, value) == 1 for option, value in options)
