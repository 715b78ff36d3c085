"""How many updates are deferred follows from what was measured; steps keep their bits."""

from types import SimpleNamespace

import pytest
from test_local import PROGRAM, RecordingEngine, runner, store

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
        return True

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
        given.times = UpdateTimes(ALL, ALL / PACE, given.limits[-1] if given.limits else 0)
    return given.limits


def test_spare_time_of_the_backward_sweep_is_used_where_the_forward_waited():
    assert deferred_after((10.0, 1.0, 5.0)) == [int(SHARE * 5.0 * PACE)]
    assert deferred_after((10.0, 1.0, 50.0)) == [ALL]


def test_nothing_is_deferred_where_nobody_waits():
    assert deferred_after((10.0, 0.9 * LATE * 10, 5.0)) == [0]
    assert deferred_after((10.0, 1.0, 0.9 * LEAST * ALL / PACE / SHARE)) == [0]


def test_what_is_deferred_counts_as_spare_time_of_the_next_step():
    """Else every second step would defer nothing."""
    first = int(SHARE * 5.0 * PACE)
    after = 5.0 - first / PACE
    limits = deferred_after((10.0, 1.0, 5.0), (9.0, 0.0, after), (9.0, 0.0, after))
    assert limits == pytest.approx([first] * 3, abs=2)
    assert deferred_after((10.0, 1.0, 5.0), (9.0, 0.0, 0.0))[-1] == int(SHARE * first)


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
        assert made.allow_early()
        engine = RecordingEngine({}, stages_ahead)
        monkeypatch.setattr(engine, "load", lambda stage, weights: None)
        steps = runner(made, engine, lambda step: schedule)

        def measured(seconds, late, spare):
            counts.append(made.take_update_times().deferred_elements)
            steps._deferred._elements = next(forced)
            made.defer(steps._deferred._elements)

        monkeypatch.setattr(steps._deferred, "measured", measured)
        losses = [steps.run().loss for _ in range(5)]
        return losses, made.content_hash()

    expected = train(iter([0] * 5))
    assert not any(counts)
    most = sum(spec.elements for spec in PROGRAM.weights.values())
    counts.clear()
    assert train(iter([most, 10, most // 2, 0, most])) == expected
    assert any(counts)
