"""Figures of a prediction, from spans that are written by hand."""

from types import SimpleNamespace

import pytest

from penstock.prediction import Prediction
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
