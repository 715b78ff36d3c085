"""When a run tells that it compiles kernels."""

from penstock.kernels import code_cache
from penstock.telemetry import Compiling
from penstock.training.compilation_events import reported_compilation


def test_first_steps_have_one_event_and_a_later_compilation_has_its_own():
    events, steps = [], iter((5, 5, 5, 6, 12, 12, 13))  # asked for twice if there is an event
    with reported_compilation(events.append, lambda: next(steps)):
        for _ in range(5):
            code_cache._before_compilation()
    assert events == [Compiling(5), Compiling(12, again=True)]
    assert code_cache._before_compilation is None


def test_run_without_compilation_has_no_event():
    events = []
    with reported_compilation(events.append, lambda: 0):
        pass
    assert events == []
