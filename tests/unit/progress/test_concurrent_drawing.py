"""A view's thread draws while the training thread records."""

import io
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from events_of_a_run import started, step
from rich.console import Console

from penstock.progress import LiveView
from penstock.progress.state import Progress
from penstock.telemetry.events import Evaluated, Saved

STEPS = 500
PROPERTIES = [name for name, member in vars(Progress).items() if isinstance(member, property)]


@pytest.fixture(autouse=True)
def frequent_thread_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def events_of_runs():
    """Yield the events of one run after another; each start resets what the last run has left."""
    while True:
        yield started(steps=STEPS)
        for number in range(1, STEPS + 1):
            yield replace(step(number), sparsity=0.5, changed_entries=number % 2)
            if number % 50 == 0:
                yield Evaluated(number, 100.0 / number, 22.2, 1.0, best=True)
                yield Saved(number, Path("checkpoints/step"), 3.0, 1 << 30)


def read_properties(view):
    assert [getattr(view._progress, name) for name in PROPERTIES]


@pytest.mark.parametrize(("read", "times"), [(read_properties, 10_000), (LiveView.render, 1000)])
def test_progress_is_read_while_another_thread_records(read, times):
    view, errors = LiveView(Console(file=io.StringIO())), []

    def draw():
        try:
            for _ in range(times):
                read(view)
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=draw)
    reader.start()
    for event in events_of_runs():
        view(event)
        if not reader.is_alive():
            break
    assert errors == []


def test_recorded_event_leaves_earlier_progress_unchanged():
    """A drawing that has begun shows one state, not parts of two."""
    before = Progress(lambda: 0.0).after(started())
    for number in range(1, 1500):
        before = before.after(step(number))
    shown = [getattr(before, name) for name in PROPERTIES], before.losses, before.last
    later = before
    for event in (step(1500, seconds=9.0), Evaluated(1500, 3.0, 20.1, 1.0, True), started()):
        later = later.after(event)
    assert ([getattr(before, name) for name in PROPERTIES], before.losses, before.last) == shown
    assert before.best_loss is None
    assert later.last is None
