"""What the page of a prediction says about its accuracy and about lost engines."""

import dataclasses

import pytest
from described_machines import DESK, RACK, RATES, TINY
from rich.console import Console

from penstock.calibration import HostKey, MeasuredRun, keep, keep_run, kept_machine
from penstock.config import Config
from penstock.machines import MachineDescription
from penstock.prediction import Planner, as_json, draw_timing, figures, page
from penstock.progress import show_duration

KEY = HostKey("a processor", 2, "1", "2", "3")


@pytest.fixture(autouse=True)
def _kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def shown(prediction):
    console = Console(width=400)
    with console.capture() as capture:
        console.print(page(prediction, ()))
    return capture.get()


def planned(machine, notice=lambda text: None, **changes):
    description = MachineDescription.model_validate(machine)
    return Planner(notice).plan(Config.from_mapping({**TINY, **changes}), description)


def test_interval_is_printed_from_the_tenth_measured_run_on():
    keep(MachineDescription.model_validate(DESK), KEY)
    prediction = planned(DESK)
    for number in range(10):
        text = shown(dataclasses.replace(prediction, machine=kept_machine(KEY)))
        assert "(no interval yet: fewer than 10 runs were measured on this host)" in text
        assert "nine of ten" not in text
        keep_run(MeasuredRun("2026-11-23", "tiny", 1.0, 0.9 + number / 45, 10, 10), KEY)
    prediction = dataclasses.replace(prediction, machine=kept_machine(KEY))
    assert "(nine of ten measured runs: " in shown(prediction)
    low, high = prediction.step_interval
    inside = [0.9 + n / 45 for n in range(10) if low < (0.9 + n / 45) * prediction.step_seconds]
    inside = [ratio for ratio in inside if ratio * prediction.step_seconds < high]
    assert len(inside) >= 8  # the two outermost of ten lie at its ends


@pytest.mark.parametrize(("low", "high", "word"), [(2.1, 24, "short"), (0.2, 0.8, "long")])
def test_prediction_outside_the_interval_of_measured_runs_is_said_to_be_wrong(low, high, word):
    accuracy = {"low": low, "high": high, "runs": 13, "source": "runs.jsonl"}
    prediction = planned({**DESK, "accuracy": accuracy}, run={"steps": 100})
    shown_high = {24: "24", 0.8: "0.80"}[high]
    text = (
        f"Predicted times are too {word} on this machine: nine of ten of the last 13 measured runs "
        f"took {low:.2f} to {shown_high} times as long as predicted. Rely on the measured range, "
        f"or correct the rates of {DESK['name']}"
    )
    assert f"{text}." in shown(prediction)
    found = as_json(prediction, [])
    assert found["accuracy_note"] == text
    assert found["run_seconds"] == pytest.approx(100 * prediction.step_seconds)  # not corrected


def test_run_has_the_interval_of_measured_runs_as_a_step_has():
    accuracy = {"low": 0.5, "high": 2, "runs": 13, "source": "runs.jsonl"}
    prediction = planned({**DESK, "accuracy": accuracy}, run={"steps": 100})
    low, high = as_json(prediction, [])["run_seconds_interval"]
    assert (low, high) == pytest.approx(
        (50 * prediction.step_seconds, 200 * prediction.step_seconds)
    )
    text = shown(prediction)
    assert f"(by the measured runs: {show_duration(low)} to {show_duration(high)})" in text
    assert "Predicted times are too" not in text
    assert as_json(prediction, [])["accuracy_note"] is None


def test_described_machine_says_that_no_runs_were_compared():
    assert "(not compared with measured runs on this machine)" in shown(planned(DESK))


def test_page_says_what_happens_when_an_engine_is_lost():
    never = {"recompute": "never"}
    roomy = planned(RACK, engines=2, engine=never)
    assert roomy.plan.least_engines == 1
    assert "If engines are lost, 1 or more of 2 go on." in shown(roomy)
    notices = []
    cut = {**never, "memory": roomy.plan.shares.engine_peak - 1}  # of twice its share
    alone = planned(RACK, engine=cut).plan.shares.engine_peak  # with the smallest stages
    tight = {**never, "memory": alone - 1}
    least = planned(RACK, engines=2, engine=tight, notice=notices.append)
    assert least.plan.least_engines == 2
    assert "If an engine is lost, a step waits until it has been replaced." in shown(least)
    assert notices == [
        "engines: if one of 2 is lost, a step waits until it has been replaced, since the others "
        "have no memory for its share; to go on with fewer, raise engine.memory or engines, or "
        "lower batch.size"
    ]


@pytest.mark.parametrize(("engines", "relays"), [(1, 0), (2, 4), (4, 6)])
def test_page_says_how_many_relays_keep_up_with_the_links(engines, relays):
    planned_run = planned(RACK, engines=engines, batch={"size": 4, "micro": 1})
    text = f"{relays} relays (fabric.relays) forward weights"
    assert (text in shown(planned_run)) == bool(relays)
    assert as_json(planned_run, [])["relays"] == relays
    fixed = {"fabric": {"relays": 3}, "cluster": {"start": "local"}}
    assert planned(RACK, engines=engines, batch={"size": 4, "micro": 1}, **fixed).relays == 3


def test_page_of_one_host_names_no_relays():
    assert "relays" not in shown(planned(DESK))


@pytest.mark.parametrize(("steps", "dense"), [(99, 0), (301, 3)])
def test_steps_with_dense_gradients_are_named_if_there_are_any(steps, dense):
    sparsity = {"method": "rigl", "sparsity": 0.5, "update_every": 100, "update_end": steps}
    prediction = planned(DESK, sparsity=sparsity, run={"steps": steps})
    assert prediction.dense_step_seconds is not None
    text = f"; {dense} of them compute the gradients of absent entries too"
    assert (text in shown(prediction)) == (dense > 0)
    assert ("of absent entries" in shown(prediction)) == (dense > 0)


@pytest.mark.parametrize(("speed", "unit"), [(1e-3, "s"), (1.0, "ms"), (1e3, "us")])
def test_axis_of_the_picture_of_a_step_has_the_unit_that_suits_it(monkeypatch, speed, unit):
    rates = [{**curve, "rates": [speed * rate for rate in curve["rates"]]} for curve in RATES]
    store = {"memory": "24GiB", "rates": [{"work": "update", "rates": [speed * 1e10]}]}
    prediction = planned({**DESK, "engine": {"is_host": True, "rates": rates}, "store": store})
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, *paths: drawn.append(figure))
    draw_timing((), prediction)
    [axes] = drawn[0].axes
    assert axes.get_xlabel() == f"time in one step ({unit})"
    size = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
    end = axes.get_xlim()[1]
    assert 1 <= end < 1000
    assert end * size == pytest.approx(prediction.step_seconds)
    ends = [path.get_extents().x1 for bars in axes.collections for path in bars.get_paths()]
    assert max(ends) == pytest.approx(end, rel=0.01)


def test_page_says_when_the_link_is_wider_than_the_weights():
    wide = {**RACK, "link": {**RACK["link"], "value_bytes": 4}}
    said = "The link of rack takes 4 bytes for a value of any type."
    assert said in shown(planned(wide, precision="bf16"))
    assert said not in shown(planned(wide, precision="fp32"))
    assert said not in shown(planned(RACK, precision="bf16"))
