"""How the seconds of steps are divided between computing and the rest."""

from penstock.distributed.control.worker_stats import ComputeTimer
from penstock.distributed.control_messages import WorkerMetrics


def said(**computed: float) -> dict[int, WorkerMetrics]:
    return {int(name[1:]): WorkerMetrics(0, seconds, 1) for name, seconds in computed.items()}


def test_of_each_step_the_slowest_engine_counts():
    watch = ComputeTimer()
    assert watch.of_step(said(e1=1.0, e2=3.0), 5.0) == 3.0
    assert watch.of_step(said(e1=5.0, e2=4.0), 5.0) == 4.0


def test_what_a_beat_said_late_counts_for_the_next_step():
    watch = ComputeTimer()
    assert watch.of_step(said(e1=0.0), 1.0) == 0.0
    assert watch.of_step(said(e1=1.5), 1.0) == 1.0
    assert watch.of_step(said(e1=1.75), 1.0) == 0.75


def test_an_engine_that_has_come_begins_at_nothing_and_one_that_left_counts_no_more():
    watch = ComputeTimer()
    watch.of_step(said(e1=100.0), 200.0)
    assert watch.of_step(said(e1=101.0, e2=2.0), 5.0) == 2.0
    assert watch.of_step(said(e2=2.5), 5.0) == 0.5
    assert watch.of_step({}, 5.0) == 0.0
