"""Memory that a link has handed out is not handed out again while anybody can see it."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

from penstock.distributed.transport.buffer_pool import BufferPool

SIZE = 1 << 20


class Holder:
    """What holds itself: only the collector of cycles ends it."""

    def __init__(self, part: np.ndarray) -> None:
        self.part, self.itself = part, self


HOLDS = {
    "itself": lambda part: part,
    "a part of a part": lambda part: part[7:].view(np.uint8)[3:9],
    "another type": lambda part: part.view(np.float32)[3:9],
    "a buffer": lambda part: part.data,
    "a tensor of it": lambda part: torch.frombuffer(part, dtype=torch.float32)[5:],
    "a tensor of a part": lambda part: torch.from_numpy(part[8:]).view(torch.float32),
    "a closure": lambda part: lambda: part,
    "a cycle": Holder,
}


@pytest.mark.parametrize("fewer", [0, 1], ids=["counts all", "borrows"])
@pytest.mark.parametrize("how", HOLDS)
def test_buffer_is_reused_only_after_last_view_ends(how, fewer, monkeypatch):
    """However an interpreter counts references: CPython 3.14 borrows where others count one."""
    count = sys.getrefcount
    # What holds it is counted once more by the function that stands before the real one.
    monkeypatch.setattr(sys, "getrefcount", lambda thing: count(thing) - 1 - fewer)
    buffers = BufferPool()
    part = buffers.take(SIZE)
    begin = part.ctypes.data
    part[:] = 1
    held = HOLDS[how](part)
    del part
    others = [buffers.take(SIZE) for _ in range(20)]
    for other in others:
        assert not begin <= other.ctypes.data < begin + SIZE
        other[:] = 2
    del other, others
    assert buffers.take(SIZE).ctypes.data != begin
    del held
    if HOLDS[how] is Holder:
        gc.collect()
    found = {part.ctypes.data for part in [buffers.take(SIZE) for _ in range(8)]}
    assert begin in found


def test_pool_reuses_memory_up_to_its_limit():
    buffers = BufferPool()
    held = [buffers.take(SIZE) for _ in range(12)]
    for number, part in enumerate(held):
        part[:] = number
    for number, part in enumerate(held):
        assert (part == number).all()
    kept, rest = ([part.ctypes.data for part in some] for some in (held[:8], held[8:]))
    del part
    del held[3], held[:2]
    assert {buffers.take(SIZE).ctypes.data for _ in range(20)} <= {kept[n] for n in (0, 1, 3)}
    del held
    addresses = {part.ctypes.data for part in [buffers.take(SIZE) for _ in range(8)]}
    assert addresses == set(kept)
    assert not addresses & set(rest)


def test_payload_larger_than_free_buffers_gets_new_memory():
    buffers = BufferPool()
    small = buffers.take(SIZE)
    begin = small.ctypes.data
    del small
    large = buffers.take(9 << 20)
    large[:] = 7
    assert large.ctypes.data != begin
    assert large.nbytes == 9 << 20


def test_views_end_in_other_threads_while_buffers_are_taken():
    """Everyone finds in his what he has written, however the threads meet."""
    buffers, wrong = BufferPool(), []
    handed: list[tuple[int, np.ndarray]] = []
    may_take = threading.Semaphore(0)

    def check() -> None:
        for _ in range(300):
            may_take.acquire()
            number, part = handed.pop(0)
            if not (part == number % 251).all():
                wrong.append(number)

    threads = [threading.Thread(target=check) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(600):
        part = buffers.take(1 << 16)
        part[:] = number % 251
        handed.append((number, part))
        may_take.release()
    for thread in threads:
        thread.join()
    assert not wrong


def test_buffer_outlives_its_connection():
    buffers = BufferPool()
    part = buffers.take(SIZE)
    part[:] = 5
    gone = weakref.ref(buffers)
    del buffers
    gc.collect()
    assert gone() is None
    assert (part == 5).all()
