"""A small form of `benchmarks/planner.py`: bytes are exact, times have the right order."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from penstock.calibration import host_measurement
from penstock.calibration.operator_cases import operator_cases
from penstock.calibration.overhead_cases import overhead_cases
from penstock.calibration.store_cases import store_cases
from penstock.engine import target_of
from penstock.kernels.processor import Processor
from penstock.machines import dump

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FACTOR, TRIES = 3.0, 3
# Large enough that a step computes for longer than it calls, and small enough to compile at once.
MODEL = {"preset": "tiny", "n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 8192}


@pytest.fixture
def planner(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("planner")


def small_cases(_):
    """Two sizes of each kind of work, those nearest to a small model."""
    yield from overhead_cases()
    counts: dict[object, int] = {}
    products = target_of("cpu").choose_products(Processor.here())
    for case in (*operator_cases(products, 1), *store_cases()):
        counts[case.quantity] = counts.get(case.quantity, 0) + 1
        if counts[case.quantity] <= 2:
            yield case


def measured_host(folder, monkeypatch):
    monkeypatch.setattr(host_measurement, "processor_cases", small_cases)
    monkeypatch.setattr(host_measurement, "compile_kernels", lambda on_progress: None)
    monkeypatch.setattr(host_measurement, "_links_of", lambda stack, notice: None)
    path = folder / "host.yaml"
    path.write_text(dump(host_measurement.calibrate(2, folder)))
    return path


@pytest.mark.long
@pytest.mark.parametrize("kind", ["in memory", "on flash"])
def test_small_run_does_what_was_predicted(planner, tmp_path, monkeypatch, kind):
    """Other tests may slow the run or its measurement, so both are repeated before they count."""
    more = planner.flash("64MiB") if kind == "on flash" else {}
    precision = "bf16" if kind == "on flash" else "fp32"
    case = planner.run(MODEL, 8, 64, precision, **more)
    ratios = []
    for number in range(TRIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        row = planner.predict_and_train(case, measured_host(folder, monkeypatch), folder)
        assert row["is_exact"], row["bytes"]
        ratios.append(row["seconds"] / row["predicted_seconds"])
        if 1 / FACTOR < ratios[-1] < FACTOR:
            return
    raise AssertionError(f"measured over predicted time: {ratios}")
