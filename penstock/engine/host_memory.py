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
import itertools
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

# Thresholds that glibc's own grow to in a process that has freed a large mapping. They do not grow
# any more once they have been set.
_UNSET_OPTIONS = (
    (_M_MMAP_MAX, _MANY),
    (_M_MMAP_THRESHOLD, 32 << 20),
    (_M_TRIM_THRESHOLD, 64 << 20),
    (_M_TOP_PAD, 128 << 10),
)


class HostMemory(NamedTuple):
    """The resident memory of a process, and the bytes by which it may grow."""

    resident: int
    room: int


class _Setting(NamedTuple):
    """Whether pages are kept, and the limit of the process."""

    keeps: bool
    limit: "_Limit | None"


_numbers = itertools.count(1)
_settings: dict[int, _Setting] = {}  # those that have not ended; the last one counts
_limit: "_Limit | None" = None  # of the setting that counts
_are_kept = False


class _Call(NamedTuple):
    """A call that has begun: its bytes, and the resident memory, returns and steps before it."""

    size: int
    resident: int
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

    def __init__(self, read_memory: Callable[[], HostMemory]) -> None:
        self.returns = self.steps = 0
        self._read_memory = read_memory
        self._added: dict[int, tuple[int, int, int]] = {}  # by size: bytes, returns, steps
        self._added_after_return: dict[int, int] = {}
        self._call: _Call | None = None

    def begin(self, size_bytes: int) -> None:
        """Prepare a call."""
        memory = self._read_memory()
        self._observe(memory.resident)
        expected = self._expected(size_bytes)
        is_after_return = expected > memory.room
        if is_after_return:
            return_free_pages()
            memory, expected = self._read_memory(), self._expected_after_return(size_bytes)
        keeps = expected <= memory.room
        if keeps and not _are_kept:
            _keep()
        elif _are_kept and not keeps:
            _map_tensors()
        resident = memory.resident
        self._call = _Call(size_bytes, resident, is_after_return, self.returns, self.steps)

    def _expected(self, size_bytes: int) -> int:
        added, returns, steps = self._added.get(size_bytes, (0, -1, 0))
        if returns != self.returns:
            return self._expected_after_return(size_bytes)
        return size_bytes // 8 + (0 if steps < self.steps else added)

    def _expected_after_return(self, size_bytes: int) -> int:
        return self._added_after_return.get(size_bytes, 2 * size_bytes)

    def _observe(self, resident: int) -> None:
        """Note what the call before has added, if it kept pages."""
        call = self._call
        if call is None or not _are_kept:
            return
        added = max(0, resident - call.resident)
        self._added[call.size] = added, call.returns, call.steps
        if call.is_after_return:
            known = self._added_after_return.get(call.size, 0)
            self._added_after_return[call.size] = max(
                call.size, added + added // 8, known - known // 8
            )


def keep_freed_pages(read_memory: Callable[[], HostMemory] | None = None) -> int:
    """Let glibc reuse its pages for large tensors; return the number of the setting.

    The setting is that of the whole process, until `end_setting`; of several the latest counts.
    `read_memory` says how much the process may grow; by default it has no limit.
    """
    limit = None if read_memory is None else _Limit(read_memory)
    return _begin_setting(_Setting(True, limit))


def map_tensors() -> int:
    """Let glibc return large tensors when they are freed, and return its free pages; return the
    number of the setting.

    Memory is then what tensors need, but for those that fit into free places of the heap.
    """
    return _begin_setting(_Setting(False, None))


def end_setting(number: int) -> None:
    """End a setting: the latest of those that have not ended counts again."""
    if _settings.pop(number, None) is not None:
        _apply()


@contextlib.contextmanager
def freed_pages_kept() -> Iterator[None]:
    """Keep freed pages without a limit for a while."""
    number = keep_freed_pages()
    try:
        yield
    finally:
        end_setting(number)


def _begin_setting(setting: _Setting) -> int:
    number = next(_numbers)
    _settings[number] = setting
    _apply()
    return number


def _apply() -> None:
    """Make the latest setting that of the process; without one, pages are returned as usual."""
    global _are_kept, _limit
    latest = next(reversed(_settings.values()), None)
    _limit = None
    if latest is not None and latest.keeps:
        if _keep():
            _limit = latest.limit
        return
    _are_kept = False
    if _map_tensors() if latest is not None else _set(*_UNSET_OPTIONS):
        return_free_pages()


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
