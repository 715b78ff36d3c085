"""How many updates are deferred follows from what was measured; steps keep their bits."""

import threading
import time
from types import SimpleNamespace

import pytest
from test_local import PROGRAM, RecordingEngine, runner, store

from penstock.engine.slots import Arrived
from penstock.step.deferred_updates import LATE, LEAST, SHARE, DeferredUpdates
from penstock.step.fetching import Fetches
from penstock.step_schedule import StepSchedule
from penstock.store import UpdateTimes

ALL = 1000
PACE = 100.0  # elements per second


class Deferring:
    """Has the interface of a store that defers, and the times it is given."""

    early_elements = ALL

    def __init__(self) -> None:
        self.times = UpdateTimes(ALL, ALL / PACE)
        self.limits: list[int] = []

    def allow_early(self):
        raise AssertionError("whoever makes the store has called it")

    def defer(self, elements):
        self.limits.append(elements)

    def make_deferred(self, stage):
        raise OSError("of the store")

    def take_update_times(self):
        return self.times


def deferred_after(*steps, given=None):
    given = given or Deferring()
    deferred = DeferredUpdates(given, Fetches(lambda operation: []))
    for step in steps:
        deferred.measured(*step)
    return given.limits


def test_spare_time_of_the_backward_sweep_is_used_where_the_forward_waited():
    assert deferred_after((10.0, 1.0, 5.0)) == [int(SHARE * 5.0 * PACE)]
    assert deferred_after((10.0, 1.0, 50.0)) == [ALL]


def test_nothing_is_deferred_where_nobody_waits():
    assert deferred_after((10.0, 0.9 * LATE * 10, 5.0)) == [0]
    assert deferred_after((10.0, 1.0, 0.9 * LEAST * ALL / PACE / SHARE)) == [0]


def test_time_in_which_gradients_waited_for_updates_is_spare_time_too():
    """It was that before, and would be without these updates."""
    given = Deferring()
    given.times = UpdateTimes(ALL, ALL / PACE, 300, blocked_seconds=2.0)
    assert deferred_after((10.0, 1.0, 3.0), given=given) == [int(SHARE * 5.0 * PACE)]


def test_deferring_goes_on_where_the_forward_no_longer_waits():
    assert deferred_after((10.0, 1.0, 5.0), (9.0, 0.0, 5.0)) == [int(SHARE * 5.0 * PACE)] * 2
    assert deferred_after((10.0, 1.0, 5.0), (9.0, 0.0, 0.1))[-1] == 0


def test_stores_without_early_weights_are_left_alone():
    given = Deferring()
    given.early_elements = 0
    assert deferred_after((10.0, 1.0, 5.0), given=given) == []
    assert deferred_after((10.0, 1.0, 5.0), given=SimpleNamespace(limits=[], times=None)) == []
    given = Deferring()
    given.times = UpdateTimes()  # the first step has no updates
    assert deferred_after((10.0, 1.0, 5.0), given=given) == []


def test_error_of_a_deferred_update_is_raised_before_its_gradients_are_received():
    given = Deferring()
    deferred = DeferredUpdates(given, Fetches(lambda operation: []))
    deferred.measured(10.0, 1.0, 5.0)
    operation = SimpleNamespace(number=3, stage=1, gradients=("w",))
    deferred.start(operation)
    with pytest.raises(OSError, match="of the store"):
        deferred.finish(operation)
    deferred.start(operation)
    deferred.abandon()
    deferred.finish(operation)


@pytest.mark.parametrize("recompute", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("stages_ahead", [1, 2])
def test_steps_have_the_same_bits_with_deferred_updates(recompute, stages_ahead, monkeypatch):
    schedule, counts = StepSchedule.of(PROGRAM, recompute), []

    def train(forced):
        made = store()
        made.allow_early()
        engine = RecordingEngine({}, stages_ahead)
        monkeypatch.setattr(engine, "load", lambda stage, weights: None)
        steps = runner(made, engine, lambda step: schedule)

        def measured(seconds, late, spare):
            counts.append(made.take_update_times().deferred_elements)
            steps._deferred._elements = next(forced)
            made.defer(steps._deferred._elements)
            return 0.0

        monkeypatch.setattr(steps._deferred, "measured", measured)
        losses = [steps.run().loss for _ in range(5)]
        return losses, made.content_hash()

    expected = train(iter([0] * 5))
    assert not any(counts)
    most = sum(spec.elements for spec in PROGRAM.weights.values())
    counts.clear()
    assert train(iter([most, 10, most // 2, 0, most])) == expected
    assert any(counts)


class Slow(RecordingEngine):
    """Computes for a while, and takes what it is given."""

    def load(self, stage, weights) -> None:
        self.calls.append(("load", stage))

    def forward(self, stage) -> None:
        time.sleep(0.02)
        super().forward(stage)


def deferring(engine, monkeypatch):
    """Return a store and the runner of steps that defer all of its updates."""
    made = store()
    made.allow_early()
    steps = runner(made, engine, lambda step: StepSchedule.of(PROGRAM))
    measured = steps._deferred.measured

    def deferring_all(*seconds):
        blocked = measured(*seconds)
        made.defer(made.early_elements)
        return blocked

    monkeypatch.setattr(steps._deferred, "measured", deferring_all)
    for _ in range(2):
        steps.run()
    return made, steps


@pytest.mark.parametrize("slow", sorted(n for n, w in PROGRAM.weights.items() if w.trainable))
def test_waits_for_deferred_updates_are_time_of_updates(slow, monkeypatch):
    made, steps = deferring(Slow({}, stages_ahead=1), monkeypatch)
    steps.run()
    apply, threads = made._updates._apply, []

    def slowly(name):
        threads.append(threading.current_thread())
        time.sleep(0.5 if name == slow else 0)
        apply(name)

    monkeypatch.setattr(made._updates, "_apply", slowly)
    done = steps.run()
    assert threading.main_thread() not in threads  # no update is left to `receive`
    # The engine computes for 0.06 s, beside which an update may be made.
    assert done.update_seconds > 0.4
    assert done.compute_seconds < done.seconds - 0.4
    assert done.weight_seconds < 0.1


def test_late_and_spare_seconds_are_those_of_one_step(monkeypatch):
    made, now, found = store(), [0.0], []
    fetch = made.fetch

    def passes(seconds):
        now[0] += seconds

    class Late(Arrived):
        def wait(self):
            passes(1)
            return super().wait()

    class Waits(RecordingEngine):
        def load(self, stage, weights):
            passes(100)

        def _gradients(self, sweep, stage):
            passes(1000)
            return Late(super()._gradients(sweep, stage)._nodes)

    def slow_fetch(stage, positions=None):
        passes(10)
        return fetch(stage, positions)

    monkeypatch.setattr(made, "fetch", slow_fetch)
    steps = runner(made, Waits({}), lambda step: StepSchedule.of(PROGRAM))
    steps._spans.clock = lambda: now[0]
    monkeypatch.setattr(steps._deferred, "measured", lambda *s: found.append(s) or 0.0)
    for _ in range(2):
        steps.run()
    # Weights of 4 stages; gradients of 3, while those before are computed; 7 operations.
    assert found == [(7 * 110 + 4 * 1001, 40, 3)] * 2


@pytest.mark.parametrize("error", [RuntimeError("of the engine"), KeyboardInterrupt()])
def test_failed_step_leaves_no_update_running(error, monkeypatch):
    engine = Slow({}, stages_ahead=1)
    made, steps = deferring(engine, monkeypatch)
    apply, running, ended = made._updates._apply, threading.Event(), []

    def slowly(name):
        running.set()
        time.sleep(0.1)
        apply(name)
        ended.append(name)

    def failing(stage):
        assert running.wait(20)
        raise error

    monkeypatch.setattr(made._updates, "_apply", slowly)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "turn", failing)
        with pytest.raises(type(error)):
            steps.run()
    after = len(ended)
    assert after  # the updates of the turn were awaited
    assert not steps._deferred._making
    time.sleep(0.15)
    assert len(ended) == after
    assert steps.run().step == 3
