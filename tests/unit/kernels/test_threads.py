"""Kernels may be called from several Python threads at once, whatever pool Numba found."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest

from penstock.kernels import blocks, compilation
from penstock.kernels.gradients import copy_gradient


def test_calls_from_several_threads_do_not_disturb_each_other():
    gradients = [np.random.default_rng(seed).random(300_001, np.float32) for seed in range(4)]
    alone = [copy_gradient(gradient, np.empty_like(gradient)) for gradient in gradients]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            together = pool.map(lambda g: copy_gradient(g, np.empty_like(g)), gradients)
            for found, expected in zip(together, alone, strict=True):
                np.testing.assert_array_equal(found, expected)


@pytest.fixture
def three_threads(monkeypatch):
    """Numba's own count, which a machine of one processor keeps at one, is left alone."""
    count = [3]
    monkeypatch.setattr(numba, "get_num_threads", lambda: count[0])
    monkeypatch.setattr(numba, "set_num_threads", lambda threads: count.__setitem__(0, threads))
    return count


@pytest.mark.parametrize(
    ("length", "threads"),
    [(0, 1), (1, 1), (65_536, 1), (65_537, 2), (131_073, 3), (10**7, 3)],
)
@pytest.mark.parametrize("of", [lambda array: array, lambda array: (array, array)])
def test_no_more_threads_than_blocks(length, threads, of, three_threads, monkeypatch):
    monkeypatch.setattr(blocks, "kernel", lambda function: function)

    @blocks.block_kernel(over="data")
    def used(_before, data):
        return three_threads[0]

    assert used(None, of(np.empty(length, np.uint8))) == threads
    assert three_threads == [3]


def test_threads_are_as_before_after_an_error(three_threads, monkeypatch):
    monkeypatch.setattr(blocks, "kernel", lambda function: function)

    @blocks.block_kernel(over="data")
    def fail(data):
        raise ValueError("as it does")

    with pytest.raises(ValueError, match="as it does"):
        fail(np.empty(1))
    assert three_threads == [3]


@pytest.mark.parametrize("raises", [False, True])
def test_calls_are_serialised_without_a_thread_safe_pool(raises):
    inside = []

    def body(value):
        inside.append(value)
        assert compilation._ONE_AT_A_TIME.locked()
        if raises:
            raise ValueError("as it does")
        return value + 1

    call = compilation._one_at_a_time(body)
    if raises:
        with pytest.raises(ValueError, match="as it does"):
            call(1)
    else:
        assert call(1) == 2
    assert not compilation._ONE_AT_A_TIME.locked()
    assert inside == [1]


@pytest.mark.parametrize(
    ("layer", "loads", "may_meet"),
    [
        ("default", {"omp"}, True),
        ("default", {"tbb"}, True),
        ("default", set(), False),
        ("omp", {"omp"}, True),
        ("threadsafe", {"omp"}, True),
        ("forksafe", {"omp"}, False),
        ("forksafe", {"tbb", "omp"}, True),
        ("workqueue", {"tbb", "omp"}, False),
        ("WorkQueue", {"tbb", "omp"}, False),
    ],
)
def test_pool_is_the_one_that_numba_loads(layer, loads, may_meet, monkeypatch):
    def load(name):
        if name.rpartition(".")[2].removesuffix("pool") not in loads:
            raise ImportError(name)

    monkeypatch.setattr(numba.config, "THREADING_LAYER", layer)
    monkeypatch.setattr(compilation.importlib, "import_module", load)
    assert compilation._threads_may_meet() == may_meet


FROM_TWO_THREADS = """
import threading
import numba, numpy as np
from penstock.kernels.gradients import sums_of_squares
gradient = np.ones(1_000_000, np.float32)
calls = lambda: [sums_of_squares(gradient) for _ in range(300)]
threads = [threading.Thread(target=calls) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(numba.threading_layer())
"""


def test_pool_that_the_user_asks_for_is_used_by_one_thread_at_a_time():
    """Numba ends the process when two threads meet in this pool."""
    own = {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", FROM_TWO_THREADS],
        env={**os.environ, **own, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "workqueue"), done.stderr
