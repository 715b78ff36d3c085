"""Slabs are zeroed, aligned, of exact size, and freed with their last view."""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from own_process import in_a_process_of_its_own

from penstock.errors import BudgetError
from penstock.kernels.memory import allocate, untouched_bytes


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 2**21 - 1, 2**21, 2**21 + 1, 10_000_001])
def test_allocation_has_size_alignment_and_zeros(size):
    slab = allocate(size)
    assert slab.dtype == np.uint8
    assert slab.shape == (size,)
    assert not slab.any()
    assert slab.ctypes.data % 2**21 == 0 or size == 0
    slab.fill(255)
    assert slab.all()


def resident_bytes() -> int:
    """Return the anonymous memory of this process, to the page.

    The counters of statm lag behind on recent kernels, and a fork first faults its program in.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_touched_pages_equal_the_request_and_are_returned():
    in_a_process_of_its_own(touch_and_give_back)


def touch_and_give_back() -> None:
    size = 65 * 2**20 + 5000
    gc.collect()
    before = resident_bytes()
    slab = allocate(size)
    assert resident_bytes() - before < 2**20
    view = slab.view()
    slab.fill(1)
    taken = resident_bytes() - before
    assert size <= taken < size + 2**20
    del slab
    assert view.all()
    del view
    gc.collect()
    assert resident_bytes() - before < 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="asks mincore")
def test_untouched_bytes_are_those_of_slabs_that_are_alive():
    in_a_process_of_its_own(touch_in_parts)


def touch_in_parts() -> None:
    gc.collect()
    before = untouched_bytes()  # of slabs of other tests
    slab, small = allocate(64 << 20), allocate(5000)
    assert untouched_bytes() - before == (64 << 20) + 8192
    slab[: 32 << 20] = 1
    small[:1] = 1
    assert (31 << 20) < untouched_bytes() - before <= (32 << 20) + 4096
    view = slab[-5:]
    del slab
    assert untouched_bytes() - before > 31 << 20
    view[:] = 1
    del view, small
    gc.collect()
    assert untouched_bytes() == before


def test_slabs_may_be_made_while_they_are_counted():
    """The threads of a flash store allocate while an engine asks."""
    is_over = threading.Event()

    def count() -> None:
        while not is_over.is_set():
            untouched_bytes()

    with ThreadPoolExecutor(1) as pool:
        counting = pool.submit(count)
        for _ in range(300):
            kept = [allocate(4096) for _ in range(20)]
        is_over.set()
        counting.result()  # raises what counting has raised
    assert len(kept) == 20


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="expected a size of 0 bytes or more, got -1"):
        allocate(-1)


def test_too_large_allocation_is_refused_by_size():
    with pytest.raises(BudgetError, match=r"the operating system refused \d+ bytes .* GiB"):
        allocate(2**60)
