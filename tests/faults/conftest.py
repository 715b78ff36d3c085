"""The weights of these tests are small: a second thread of a kernel would only be waited for."""

import numba
import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)
