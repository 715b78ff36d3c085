"""Cycles on a simulated wafer in the panel, and in the lines of a log."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from events_of_a_run import started, step
from rich.console import Console

from penstock.progress.log import step_line
from penstock.progress.panel import panel
from penstock.progress.state import Progress
from penstock.telemetry.events import StepCycles

CLOSED = StepCycles(
    mesh="32x32",
    cores="sim",
    clock_hz=1.1e9,
    closed_form=600_000.0,
    simulated=0.0,
    stages={
        "embed": {"forward": {"closed_form": 60_000.0}, "backward": {"closed_form": 90_000.0}},
        "lm_head": {"turn": {"closed_form": 450_000.0}},
    },
)
SIMULATED = replace(
    CLOSED,
    simulated=500_000.0,
    stages={
        "embed": {
            "forward": {"closed_form": 60_000.0},
            "backward": {"closed_form": 90_000.0, "simulated": 500_000.0},
        },
        "lm_head": {"turn": {"closed_form": 450_000.0}},
    },
)


def progress_of(cycles):
    return Progress(lambda: 0.0).after(started()).after(replace(step(1), cycles=cycles))


def shown(cycles):
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(panel(progress_of(cycles)))
    return console.export_text()


@pytest.mark.parametrize(
    ("cycles", "lines"),
    [
        (
            CLOSED,
            (
                "│ cycles    600k, closed form   0.545 ms at 1.1 GHz  ",
                "│           most in lm_head forward and backward: 450k, 75%  ",
            ),
        ),
        (
            SIMULATED,
            (
                "│ cycles    1.10M, 45% simulated, the rest closed form   1 ms at 1.1 GHz ",
                "│           most in embed backward: 590k, 54%  ",
            ),
        ),
    ],
)
def test_panel_shows_the_cycles_of_a_step_and_the_stage_with_most(cycles, lines):
    text = shown(cycles)
    for line in lines:
        assert line in text, f"{line!r} is not in\n{text}"
    assert max(map(len, text.splitlines())) <= 80


def test_cycles_without_stages_are_shown_alone():
    text = shown(replace(CLOSED, stages={}))
    assert "600k, closed form" in text
    assert "most in" not in text


def test_line_of_a_step_has_its_cycles():
    assert "  1.10M cycles  " in step_line(progress_of(SIMULATED))


def test_other_devices_show_no_cycles():
    assert "cycles" not in shown(None)
    assert "cycles" not in step_line(progress_of(None))
