"""Slabs are zeroed, aligned, of exact size, and freed with their last view."""

import gc
import os
import sys

import numpy as np
import pytest

from penstock.errors import BudgetError
from penstock.kernels.memory import allocate


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 2**21 - 1, 2**21, 2**21 + 1, 10_000_001])
def test_size_alignment_and_contents(size):
    slab = allocate(size)
    assert slab.dtype == np.uint8
    assert slab.shape == (size,)
    assert not slab.any()
    assert slab.ctypes.data % 2**21 == 0 or size == 0
    slab.fill(255)
    assert slab.all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_touched_is_what_was_asked_for_and_goes_back():
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


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="expected a size of 0 bytes or more, got -1"):
        allocate(-1)


def test_more_than_there_is_is_refused_by_name():
    with pytest.raises(BudgetError, match=r"the operating system refused \d+ bytes .* GiB"):
        allocate(2**60)
