"""When a run tells that it compiles kernels."""

import threading

import numpy as np
import pytest

from penstock.kernels import code_cache
from penstock.kernels.compilation import serial_kernel
from penstock.telemetry import Compiling
from penstock.training.compilation_events import CompilationEvents


@pytest.fixture
def compile_one(tmp_path, monkeypatch):
    """Return a function that compiles a kernel for one of ten types that the cache does not
    have."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    code_cache.writable_folder.cache_clear()
    types = iter("bhilBHILfd")
    yield lambda: serial_kernel(total)(np.ones(3, next(types)))
    code_cache.writable_folder.cache_clear()


def total(values):
    return values.sum()


def test_first_steps_have_one_event_and_a_later_compilation_has_its_own(compile_one):
    events = []
    reports = CompilationEvents(events.append)
    for step in (5, 6, 12, 13):
        with reports.reported(lambda step=step: step):
            compile_one()
    assert events == [Compiling(5), Compiling(12, again=True)]
    assert not code_cache._before_compilation


def test_run_without_compilation_has_no_event(compile_one):
    kernel = serial_kernel(total)
    kernel(np.ones(3))
    events = []
    with CompilationEvents(events.append).reported(lambda: 0):
        kernel(np.ones(3))
    assert events == []


def test_listener_may_wait_for_a_thread_that_compiles(compile_one):
    """The thread that compiles has Numba's lock while it asks for kept code."""
    done = threading.Event()

    def listener(event):
        thread = threading.Thread(target=lambda: (compile_one(), done.set()))
        thread.start()
        thread.join(30)

    with CompilationEvents(listener).reported(lambda: 0):
        compile_one()
        assert done.wait(30)


def test_two_runs_end_in_any_order(compile_one):
    first, second = [], []
    one = CompilationEvents(first.append).reported(lambda: 0)
    two = CompilationEvents(second.append).reported(lambda: 0)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    compile_one()
    two.__exit__(None, None, None)
    compile_one()
    assert (first, second) == ([], [Compiling(0)])


def test_error_of_the_listener_is_raised_when_asked_for_or_at_the_end(compile_one):
    def listener(event):
        raise OSError("the listener has failed")

    reports = CompilationEvents(listener)
    with pytest.raises(OSError, match="has failed"), reports.reported(lambda: 0):
        compile_one()
    with reports.reported(lambda: 9):
        compile_one()
        for thread in threading.enumerate():
            if thread.name == "penstock compilations":
                thread.join()  # ends with the error
        with pytest.raises(OSError, match="has failed"):
            reports.raise_failure()
