import numba
import pytest


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)
