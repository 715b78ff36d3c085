"""Slabs are zeroed, aligned, of exact size, and freed with their last view."""

import gc
import sys

import numpy as np
import pytest
from process_files import resident_bytes_at

from penstock.errors import BudgetError
from penstock.kernels.memory import allocate


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
    slab = allocate(size)
    address = slab.ctypes.data
    assert resident_bytes_at(address) < 2**20
    view = slab.view()
    slab.fill(1)
    assert size <= resident_bytes_at(address) < size + 2**20
    del slab
    assert view.all()
    del view
    gc.collect()
    assert resident_bytes_at(address) < 2**20


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="expected a size of 0 bytes or more, got -1"):
        allocate(-1)


def test_more_than_there_is_is_refused_by_name():
    with pytest.raises(BudgetError, match=r"the operating system refused \d+ bytes .* GiB"):
        allocate(2**60)
