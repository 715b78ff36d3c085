"""Weights that are fetched by a thread of their own, ahead of their use."""

import threading
import time
from concurrent.futures import wait

import pytest
from test_local import PROGRAM, RecordingEngine, runner, store, weights_of

from penstock.step.fetching import Fetches
from penstock.step_schedule import StepSchedule

WAIT = 20  # seconds after which a test fails instead of standing still


def schedule_of(step):
    return StepSchedule.of(PROGRAM)


class Source:
    """Notes which operations are fetched, and by which threads."""

    def __init__(self, seconds=0.0, error=None) -> None:
        self.seconds, self.error = seconds, error
        self.fetched: list[tuple[str, str]] = []

    def __call__(self, operation):
        self.fetched.append((operation, threading.current_thread().name))
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return [operation]


def test_started_fetch_is_done_once_by_another_thread():
    source = Source()
    fetches = Fetches(source)
    fetches.start("a")
    assert fetches.take("a") == ["a"]
    assert fetches.take("b") == ["b"]
    here = threading.current_thread().name
    assert [(name, thread == here) for name, thread in source.fetched] == [
        ("a", False),
        ("b", True),
    ]


def test_error_of_a_fetch_is_raised_where_its_weights_are_taken():
    fetches = Fetches(Source(error=OSError("disk")))
    fetches.start("a")
    with pytest.raises(OSError, match="disk"):
        fetches.take("a")


def test_fetch_that_nobody_takes_is_waited_for_and_forgotten():
    source = Source(seconds=0.1, error=OSError("disk"))
    fetches = Fetches(source)
    fetches.start("a")
    fetches.finish()
    source.error = None
    fetches.start("b")
    assert fetches.take("b") == ["b"]


def test_fetch_is_ready_once_it_has_ended_or_where_the_last_one_left_time():
    now, free = [0.0], threading.Semaphore(0)

    def source(operation):
        assert free.acquire(timeout=WAIT)
        now[0] += 1
        return [operation]

    fetches = Fetches(source, clock=lambda: now[0])
    assert not fetches.is_ready()  # nothing was started
    fetches.start("a")
    assert not fetches.is_ready()
    free.release()
    fetches.take("a")  # at once: it left no time
    fetches.start("b")
    assert not fetches.is_ready()
    free.release()
    wait([fetches._started[1]], WAIT)
    assert fetches.is_ready()
    now[0] += 2
    fetches.take("b")
    fetches.start("c")
    assert fetches.is_ready()  # `b` waited for longer than it took
    free.release()
    fetches.take("c")
    fetches.start("d")
    assert not fetches.is_ready()
    free.release()
    wait([fetches._started[1]], WAIT)
    now[0] += 2
    fetches.take("d")
    free.release()
    fetches.take("e")  # that was not started
    fetches.start("f")
    assert not fetches.is_ready()
    free.release()
    fetches.finish()


def test_only_time_that_nobody_waited_for_is_hidden():
    fetches = Fetches(Source(seconds=0.5))
    fetches.start("a")
    time.sleep(0.6)
    fetches.take("a")
    assert fetches.take_hidden_seconds() > 0.4
    fetches.start("b")
    fetches.take("b")
    assert fetches.take_hidden_seconds() < 0.4
    assert fetches.take_hidden_seconds() == 0


class FailingEngine(RecordingEngine):
    """Fails once, at the forward of a stage."""

    failing = None

    def forward(self, stage) -> None:
        if stage == self.failing:
            self.failing = None
            raise RuntimeError("of the engine")
        super().forward(stage)


def test_next_weights_are_fetched_while_an_engine_computes(monkeypatch):
    made = store()
    second = threading.Event()
    fetch = made.fetch

    def noting(stage, positions=None):
        if stage == 1:
            second.set()
        return fetch(stage, positions)

    class Waiting(RecordingEngine):
        def forward(self, stage) -> None:
            if stage == 0:
                assert second.wait(WAIT)
            super().forward(stage)

    monkeypatch.setattr(made, "fetch", noting)
    engine = Waiting(weights_of(made), stages_ahead=1)
    assert runner(made, engine, schedule_of).run().step == 1


def test_step_can_be_repeated_after_an_error_beside_a_fetch(monkeypatch):
    expected = store()
    runner(expected, RecordingEngine(weights_of(expected)), schedule_of).run()

    made = store()
    fetch, running = made.fetch, []

    def slow(stage, positions=None):
        running.append(stage)
        time.sleep(0.05)
        found = fetch(stage, positions)
        running.remove(stage)
        return found

    monkeypatch.setattr(made, "fetch", slow)
    engine = FailingEngine(weights_of(made), stages_ahead=1)
    engine.failing = 0
    again = runner(made, engine, schedule_of)
    taken, take = [], again._fetches.take_hidden_seconds
    monkeypatch.setattr(again._fetches, "take_hidden_seconds", lambda: taken.append(take()) or 0)
    with pytest.raises(RuntimeError, match="of the engine"):
        again.run()
    assert not running  # no thread is in the store any more
    assert again.run().step == 1
    assert taken[1] > 0  # that of the failed step, at the start of the next
    assert made.content_hash() == expected.content_hash()


def test_updates_beside_computation_are_not_in_the_time_of_a_step(monkeypatch):
    """The parts of a step's time add up to all of it."""
    made = store()
    update = made._updates._apply

    def slow(name):
        time.sleep(0.02)
        update(name)

    class Slow(RecordingEngine):
        def load(self, stage, weights) -> None:  # which updates have changed
            self.calls.append(("load", stage))

        def forward(self, stage) -> None:
            time.sleep(0.1)
            super().forward(stage)

    monkeypatch.setattr(made._updates, "_apply", slow)
    steps = runner(made, Slow(weights_of(made), stages_ahead=1), schedule_of)
    steps.run()
    done = steps.run()
    parts = (
        done.compute_seconds
        + done.weight_seconds
        + done.update_seconds
        + done.flash_wait_seconds
        + done.snapshot_seconds
    )
    assert parts == pytest.approx(done.seconds)
    assert done.compute_seconds >= 0.3
    assert 0 < done.update_seconds < 0.02 * len(PROGRAM.weights)
