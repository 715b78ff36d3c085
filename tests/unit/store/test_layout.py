"""Slabs: exact sizes, one per stage and role, a tied weight once."""

import itertools

import numpy as np
import pytest
from store_programs import LAYERS, make_program, random_weights

from penstock.store.holding import home_stages
from penstock.store.layout import allocate_role


def _address(array):
    return array.__array_interface__["data"][0]


def test_home_stage_of_a_tied_weight_is_its_first_use():
    program = make_program(LAYERS)
    assert home_stages(program)["embed"] == 0
    assert list(home_stages(program)) == list(random_weights(program, 0))


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_weights_of_a_stage_are_aligned_and_disjoint_in_one_slab(dtype):
    program = make_program(LAYERS)
    kind = np.dtype(dtype)
    arrays, total_bytes = allocate_role(program, dict.fromkeys(program.weights, kind))
    spans = []
    for name, array in arrays.items():
        assert array.dtype == kind
        assert array.shape == (program.weights[name].elements,)
        assert not array.any()
        assert _address(array) % 64 == 0
        spans.append((_address(array), _address(array) + array.nbytes))
    spans.sort()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    bases = {home_stages(program)[name]: array.base for name, array in arrays.items()}
    assert len({id(base) for base in bases.values()}) == len(bases)
    # Exact: the elements, and less than a cache line of padding between two weights.
    exact = sum(array.nbytes for array in arrays.values())
    assert exact <= total_bytes < exact + 64 * len(arrays)


def test_weights_without_the_role_take_no_memory():
    program = make_program(LAYERS)
    arrays, total_bytes = allocate_role(program, {"norm": np.dtype(np.float32)})
    assert list(arrays) == ["norm"]
    assert total_bytes == 64
