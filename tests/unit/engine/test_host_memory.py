"""How the C library keeps and returns the pages of freed tensors."""

import subprocess
import sys

import pytest

from penstock.engine import host_memory

SCRIPT = """
import resource

import torch
from penstock.engine.host_memory import keep_freed_pages, return_unused_pages

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

assert keep_freed_pages()
tensors = [torch.ones(1 << 20) for _ in range(64)]  # 256 MiB
above = torch.ones(100)  # the heap cannot shrink below it
full = resident_mib()
del tensors
found = [resident_mib() - full]
for steps in (0, 3, 4):
    return_unused_pages(steps)
    found.append(resident_mib() - full)
print(*found, float(above.sum()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are those of Linux")
def test_free_pages_are_returned_after_steps_whose_number_is_a_power_of_two():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    freed, after_none, after_three, after_four, total = map(float, done.stdout.split())
    assert freed > -20  # kept
    assert after_none > -20
    assert after_three > -20
    assert after_four < -220
    assert total == 100


LIMITED = """
import resource

import torch
from penstock.engine.host_memory import (
    HostMemory, begin_call, freed_pages_kept, keep_freed_pages
)

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20

def freed():
    tensors = [torch.ones(1 << 20) for _ in range(64)]  # 256 MiB
    global above, full
    above, full = torch.ones(100), resident_mib()  # the heap cannot shrink below it

def note():
    found.append(resident_mib() - full)

found, room = [], 64 << 20
keep_freed_pages(lambda: HostMemory(0, room))
freed()
for size in (32 << 20, (32 << 20) + 1):  # a call may add twice what it needs
    begin_call(size)
    note()
room = 1 << 30
begin_call(2 << 20)
freed()
room = -1  # more than the limit is in use already
begin_call((1 << 20) - 1)
note()
begin_call(1 << 20)
note()
with freed_pages_kept():
    freed()
    begin_call(1 << 40)
    note()
begin_call(1 << 20)
note()
print(*found)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are those of Linux")
def test_free_pages_are_returned_before_a_call_that_exceeds_the_limit():
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True
    )
    fits, exceeds, small, beyond, unlimited, restored = map(float, done.stdout.split())
    assert fits > -20
    assert exceeds < -220
    assert small > -20  # for calls that allocate so little the memory is not read
    assert beyond < -220
    assert unlimited > -20
    assert restored < -220


@pytest.fixture
def told(monkeypatch):
    """What the C library is told, in a process without a setting."""
    told: list[dict[int, int]] = []

    def note(*options):
        told.append(dict(options))
        return True

    monkeypatch.setattr(host_memory, "_set", note)
    monkeypatch.setattr(host_memory, "_settings", {})
    monkeypatch.setattr(host_memory, "_limit", None)
    monkeypatch.setattr(host_memory, "_are_kept", False)
    return told


UNSET = dict(host_memory._UNSET_OPTIONS)


def keeps(options: dict[int, int]) -> bool:
    return options[host_memory._M_MMAP_MAX] == 0


def test_setting_that_ends_gives_way_to_the_latest_that_has_not(told):
    numbers = [
        host_memory.keep_freed_pages(lambda room=room: host_memory.HostMemory(0, room))
        for room in (1, 2)
    ]
    mapped = host_memory.map_tensors()
    assert not keeps(told[-1])
    host_memory.end_setting(numbers[0])  # which no longer counted
    assert not keeps(told[-1])
    assert host_memory._limit is None
    host_memory.end_setting(mapped)
    assert keeps(told[-1])
    assert host_memory._limit._read_memory().room == 2
    host_memory.end_setting(numbers[1])
    assert told[-1] == UNSET
    assert host_memory._limit is None
    before = len(told)
    host_memory.end_setting(numbers[1])
    assert len(told) == before


def test_pages_kept_for_a_while_restore_the_setting_before(told):
    with host_memory.freed_pages_kept():
        assert keeps(told[-1])
    assert told[-1] == UNSET
    host_memory.keep_freed_pages(lambda: host_memory.HostMemory(0, 1))
    limit = host_memory._limit
    with host_memory.freed_pages_kept():
        assert host_memory._limit is None
    assert host_memory._limit is limit
    host_memory.map_tensors()
    mapped = told[-1]
    with host_memory.freed_pages_kept():
        assert keeps(told[-1])
    assert told[-1] == mapped


def test_memory_that_other_parts_take_or_return_is_not_what_a_call_has_added(monkeypatch):
    """The room may change by what is not resident: slabs that are touched, or made."""
    heap = Heap(monkeypatch, 1000 << 20)
    assert heap.call(100, 180) == "kept"
    heap.promised = -500 << 20
    host_memory.return_unused_pages(3)
    assert heap.call(40, 70) == "kept"
    added, *_ = host_memory._limit._added[100 << 20]
    assert added == 180 << 20


class Heap:
    """A process with a limit, whose calls add what a test says to its resident memory."""

    def __init__(self, monkeypatch, limit):
        self.limit, self.used, self.free, self.promised = limit, 0, 0, 0
        self.returns, self.keeps = 0, True
        monkeypatch.setattr(host_memory, "_set", self._set)
        monkeypatch.setattr(host_memory, "_settings", {})
        monkeypatch.setattr(host_memory, "_limit", None)
        monkeypatch.setattr(host_memory, "_are_kept", False)
        monkeypatch.setattr(host_memory, "return_free_pages", self._return)
        host_memory.keep_freed_pages(self._read)

    def _read(self):
        resident = self.used + self.free
        return host_memory.HostMemory(resident, self.limit - resident - self.promised)

    def _set(self, *options):
        self.keeps = (host_memory._M_MMAP_MAX, 0) in options
        return True

    def _return(self):
        self.returns, self.free = self.returns + 1, 0
        host_memory._limit.returns += 1

    def call(self, size, takes):
        """Allocate and free; return how pages were treated: kept, returned before, or mapped."""
        before = self.returns
        host_memory.begin_call(size << 20)
        if self.keeps:
            self.free = max(self.free, takes << 20)
        peak = self.used + (self.free if self.keeps else size << 20)
        assert peak <= self.limit
        if not self.keeps:
            return "mapped"
        return "kept" if self.returns == before else "returned"


def test_call_that_finds_its_places_again_returns_no_pages(monkeypatch):
    heap = Heap(monkeypatch, 300 << 20)
    for _ in range(4):
        host_memory.return_unused_pages(3)
        assert [heap.call(100, 180), heap.call(40, 70)] == ["kept", "kept"]
    assert heap.returns == 0


def test_pages_are_returned_for_a_call_whose_size_is_new(monkeypatch):
    heap = Heap(monkeypatch, 300 << 20)
    assert heap.call(60, 110) == "kept"
    heap.used = 100 << 20  # what other parts of the process have taken
    assert heap.call(100, 180) == "returned"
    heap.used = 160 << 20
    assert heap.call(99, 180) == "mapped"  # not even then is there room
    assert heap.call(40, 70) == "kept"
    heap.used = 0
    assert heap.call(98, 180) == "kept"


def test_call_expects_what_its_size_has_added_in_the_same_step(monkeypatch):
    """An equal layer before it found no places; an earlier step would have left some."""
    heap = Heap(monkeypatch, 300 << 20)
    assert heap.call(100, 180) == "kept"
    assert heap.call(100, 180) == "returned"
    host_memory.return_unused_pages(3)
    assert heap.call(100, 180) == "kept"


def test_call_expects_what_its_size_has_added_after_a_return(monkeypatch):
    heap = Heap(monkeypatch, 400 << 20)
    heap.free = 250 << 20
    assert heap.call(100, 130) == "returned"
    heap.call(2, 2)
    heap.used, heap.free = 240 << 20, 0
    host_memory.return_free_pages()  # as after some steps
    assert heap.call(100, 130) == "kept"  # 146 are expected of it, 200 of a size that is new
    assert heap.call(101, 130) == "mapped"


RESTORED = """
import torch
from penstock.engine.host_memory import freed_pages_kept

def is_kept(megabytes):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) >> 8
    before = resident()
    tensors = [torch.ones(megabytes << 18) for _ in range(4)]
    above = torch.ones(100)
    del tensors
    return resident() - before > megabytes

with freed_pages_kept():
    inside = is_kept(20)
print(inside, is_kept(200))  # larger than what the first have left of the heap
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are those of Linux")
def test_pages_are_returned_after_a_measurement_that_keeps_them():
    done = subprocess.run(
        [sys.executable, "-c", RESTORED], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]


HEAPS = """
import threading

import torch
from penstock.engine.host_memory import keep_freed_pages, share_one_heap

assert share_one_heap()
keep_freed_pages()
kept = []

def compute():
    tensors = [torch.ones(20 << 20) for _ in range(3)]  # 80 MiB each
    above = torch.ones(100)
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) >> 8
    full = resident()
    del tensors
    kept.append(full - resident())

thread = threading.Thread(target=compute)
thread.start()
thread.join()
print(*kept)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are those of Linux")
def test_thread_keeps_pages_of_tensors_larger_than_a_heap_of_its_own():
    done = subprocess.run([sys.executable, "-c", HEAPS], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 20


def test_setting_that_the_c_library_refuses_sets_no_limit(monkeypatch):
    monkeypatch.setattr(host_memory, "_set", lambda *options: False)
    returned = []
    monkeypatch.setattr(host_memory, "return_free_pages", lambda: returned.append(1))
    monkeypatch.setattr(host_memory, "_settings", {})
    host_memory.keep_freed_pages(lambda: host_memory.HostMemory(0, -1))
    host_memory.begin_call(1 << 30)
    assert not returned
