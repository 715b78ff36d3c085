"""What the tests of stores share: one thread for their small weights, and stores on flash."""

import numba
import pytest
from store_programs import flash_store

DRAM = 600_000


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """A second thread of a kernel would only be waited for."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


@pytest.fixture
def flash(tmp_path):
    """Return a maker of stores under the test's folder; whatever it made is closed."""
    made = []

    def make(program, folder="flash", *, optimizer=None, dram=DRAM, **settings):
        store = flash_store(
            program, tmp_path / folder, optimizer=optimizer, dram_bytes=dram, **settings
        )
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()
