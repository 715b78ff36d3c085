"""Figures of a prediction, from spans that are written by hand."""

from types import SimpleNamespace

import pytest

from penstock.prediction import Prediction, predicted_run
from penstock.spans import Span

SPANS = (
    Span("weights", "weights", 0.0, 2.0),
    Span("engine", "forward", 1.0, 4.0),
    Span("store", "update", 3.0, 5.0),
    Span("engine", "turn", 6.0, 8.0),
    Span("flash", "flash read", 0.0, 10.0),
    Span("store", "receive", 9.0, 12.0),  # ends in the next step
)


def prediction(spans=SPANS, seconds=10.0):
    return Prediction(None, None, None, SimpleNamespace(), None, tuple(spans), seconds)


def test_time_is_counted_for_the_first_resource_that_works():
    assert prediction().exclusive_seconds == {
        "compute": 5.0,
        "update": 1.0,
        "receive gradients": 1.0,
        "weights out": 1.0,
        "gradients in": 0.0,
    }


def test_resource_is_busy_for_its_share_of_each_sweep():
    busy = prediction().busy
    assert busy["step"]["compute"] == pytest.approx(0.5)
    assert busy["forward"]["compute"] == pytest.approx(3 / 6)
    assert busy["backward"]["receive gradients"] == pytest.approx(1 / 4)
    assert prediction().binding("step") == "flash read"


@pytest.mark.parametrize(
    ("part", "used", "unused"),
    [
        ("store, on flash besides (store.dram)", 600, 400),
        ("store, on flash besides (store.dram)", 1000, 0),
        ("calls to the store's shards, on other hosts", 600, 0),
    ],
)
def test_memory_that_a_store_on_flash_does_not_need_is_not_predicted(
    part, used, unused, monkeypatch
):
    monkeypatch.setattr(predicted_run.store_factory, "assembly_of", lambda config, program: 50)
    shares = SimpleNamespace(store=1050)
    plan = SimpleNamespace(memory={part: 1050}, shares=shares, program=None)
    flash = SimpleNamespace(memory={"weights": used - 100, "gradients": 100})
    found = Prediction(None, plan, None, SimpleNamespace(), flash, (), 1.0)
    assert found._unused_store_bytes() == unused


def test_store_in_memory_uses_what_was_planned():
    plan = SimpleNamespace(memory={"store": 1000}, shares=SimpleNamespace(store=1000))
    found = Prediction(None, plan, None, SimpleNamespace(), None, (), 1.0)
    assert found._unused_store_bytes() == 0
