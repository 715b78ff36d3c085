"""How the seconds of steps are divided between computing and the rest."""

from penstock.distributed.control.worker_stats import ComputeTimer
from penstock.distributed.control_messages import WorkerMetrics


def said(**computed: float) -> dict[int, WorkerMetrics]:
    return {int(name[1:]): WorkerMetrics(0, seconds, 1) for name, seconds in computed.items()}


def test_slowest_engine_counts_for_each_step():
    watch = ComputeTimer()
    assert watch.of_step(said(e1=1.0, e2=3.0), 5.0) == 3.0
    assert watch.of_step(said(e1=5.0, e2=4.0), 5.0) == 4.0


def test_late_heartbeat_counts_for_next_step():
    watch = ComputeTimer()
    assert watch.of_step(said(e1=0.0), 1.0) == 0.0
    assert watch.of_step(said(e1=1.5), 1.0) == 1.0
    assert watch.of_step(said(e1=1.75), 1.0) == 0.75


def test_joined_engine_starts_at_zero_and_lost_engine_is_dropped():
    watch = ComputeTimer()
    watch.of_step(said(e1=100.0), 200.0)
    assert watch.of_step(said(e1=101.0, e2=2.0), 5.0) == 2.0
    assert watch.of_step(said(e2=2.5), 5.0) == 0.5
    assert watch.of_step({}, 5.0) == 0.0


def test_engine_that_was_left_out_for_some_steps_counts_from_where_it_was():
    watch = ComputeTimer()
    watch.of_step(said(e1=100.0, e2=100.0), 200.0)
    assert watch.of_step(said(e1=101.0), 5.0) == 1.0
    assert watch.of_step(said(e1=102.0, e2=102.0), 5.0) == 2.0
    assert watch.of_step(said(e1=103.0, e2=103.0), 5.0) == 1.0
