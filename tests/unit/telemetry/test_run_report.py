"""The totals of a run: the first steps of a process, which are slower, count only in the sums."""

import json
from dataclasses import replace

import pytest
from events_of_a_run import started, step

from penstock.progress.log import compared_lines
from penstock.telemetry import PredictedStep
from penstock.telemetry.metrics_writer import MetricsFile, read_metrics, reported
from penstock.telemetry.run_report import RunReport

PREDICTED = PredictedStep(
    seconds=1.0, compute_seconds=0.9, flash_wait_seconds=0.0, weight_seconds=0.1,
    update_seconds=0.0, peak_memory_bytes=0, streamed_bytes=1, gradient_bytes=1,
    flash_read_bytes=0, flash_written_bytes=0,
)  # fmt: skip


def report_of(seconds: list[float]):
    """Return the report on steps that compute for half of their time."""
    report = RunReport(None)
    report(replace(started(), predicted=PREDICTED))
    for number, took in enumerate(seconds, 1):
        report(replace(step(number, seconds=took), compute_seconds=took / 2))
    return report.measured(sum(seconds))


def test_usual_parts_are_those_of_later_steps(tmp_path):
    measured = report_of([10.0, 6.0, 1.0, 2.0, 3.0])
    assert measured.usual_step_seconds == 2.0
    assert measured.compute_seconds == 11.0
    assert measured.usual_parts["compute_seconds"] == 1.0
    assert compared_lines(measured) == [
        "a step was predicted to take 1.0 s and took 2.0 s (+100%): compute 0.90 s, was 1.0 s; "
        "moving weights and gradients 0.10 s, was 0.00 s"
    ]
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path)(measured)
    (row,) = read_metrics(path)
    assert reported(row) == measured


@pytest.mark.parametrize("seconds", [[4.0], [4.0, 2.0]])
def test_run_of_few_steps_counts_them_all(seconds):
    measured = report_of(seconds)
    assert measured.usual_parts["compute_seconds"] == sum(seconds) / len(seconds) / 2


def test_rows_of_older_releases_have_the_parts_of_all_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path)(report_of([10.0, 6.0, 1.0, 2.0, 3.0]))
    row = json.loads(path.read_text())
    del row["usual_parts"]
    assert "compute 0.90 s, was 2.2 s" in compared_lines(reported(row))[0]


def test_damaged_parts_are_no_report(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path)(report_of([1.0, 1.0, 1.0]))
    row = json.loads(path.read_text())
    assert reported({**row, "usual_parts": {"compute_seconds": "much"}}) is None
