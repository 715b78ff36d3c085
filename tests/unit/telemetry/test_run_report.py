"""The totals of a run: the first steps of a process, which are slower, count only in the sums."""

import json
import re
from dataclasses import replace

import pytest
from events_of_a_run import started, step

from penstock.progress.log import busy_lines, compared_lines, measured_lines
from penstock.telemetry import PredictedStep
from penstock.telemetry.core_use import CoreUse
from penstock.telemetry.metrics_writer import MetricsFile, read_metrics, reported
from penstock.telemetry.run_report import RunReport

PREDICTED = PredictedStep(
    seconds=1.0, compute_seconds=0.9, flash_wait_seconds=0.0, weight_seconds=0.1,
    update_seconds=0.0, peak_memory_bytes=0, streamed_bytes=1, gradient_bytes=1,
    flash_read_bytes=0, flash_written_bytes=0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_other_programs(monkeypatch):
    """Leave out what other programs take of this machine while these tests run."""
    monkeypatch.setattr(CoreUse, "now", lambda: None)


def report_of(seconds: list[float]):
    """Return the report on steps that compute for half of their time, then update for a quarter."""
    report = RunReport(None)
    report(replace(started(), predicted=PREDICTED))
    for number, took in enumerate(seconds, 1):
        others = {"update_seconds": took / 4, "snapshot_seconds": took / 4}
        report(replace(step(number, seconds=took), compute_seconds=took / 2, **others))
    return report.measured(sum(seconds))


def test_usual_parts_are_those_of_later_steps(tmp_path):
    measured = report_of([10.0, 6.0, 1.0, 2.0, 3.0])
    assert measured.usual_step_seconds == 2.0
    assert measured.compute_seconds == 11.0
    assert measured.usual_parts["compute_seconds"] == 1.0
    assert compared_lines(measured) == [
        "a step was predicted to take 1.00 s and took 2.00 s (+100%): compute 0.90 s, was 1.00 s; "
        "moving weights and gradients 0.10 s, was 0 s; updates 0 s, was 0.50 s; waiting for "
        "a checkpoint 0 s, was 0.50 s"
    ]
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path)(measured)
    (row,) = read_metrics(path)
    assert reported(row) == measured


def test_compared_parts_add_up_to_the_compared_step():
    (line,) = compared_lines(report_of([10.0, 6.0, 1.0, 2.0, 6.0]))  # the median step takes 2 s
    assert "took 3.00 s (+200%)" in line
    assert [float(part) for part in re.findall(r"was (\S+) s", line)] == [1.5, 0.0, 0.75, 0.75]


def test_shares_and_comparison_are_of_the_same_steps():
    report = RunReport(None)
    report(replace(started(), predicted=PREDICTED))
    for number, (took, changed) in enumerate([(10, 0), (6, 0), (2, 0), (8, 40), (2, 0)], 1):
        done = step(number, seconds=took)
        # The first steps and the change of masks only update.
        spent = "compute_seconds" if took == 2 else "update_seconds"
        report(replace(done, **{spent: took, "changed_entries": changed}))
    measured = report.measured(30.0)
    assert measured.usual_step_seconds == 2
    shares, comparison, *_ = measured_lines(measured)
    assert shares == (
        "a step's time (mean of 2 steps, without the first 2 and those that change masks): "
        "compute 100%"
    )
    assert "took 2.00 s (+100%): compute 0.90 s, was 2.00 s" in comparison
    assert measured_lines(report_of([4.0, 2.0]))[0].startswith("a step's time: compute 50%")


def test_run_whose_later_steps_all_change_masks_counts_them():
    report = RunReport(None)
    report(started())
    for number, took in enumerate([10, 6, 2, 4], 1):
        report(replace(step(number, seconds=took), compute_seconds=took, changed_entries=3))
    measured = report.measured(22.0)
    assert (measured.usual_step_seconds, measured.unusual_steps) == (3, 2)


def test_comparison_says_that_the_host_was_busy_while_it_was_measured():
    measured = report_of([9.0, 9.0, 4.0])
    busy = replace(measured, predicted=replace(PREDICTED, host_was_busy=1))
    assert compared_lines(busy)[:-1] == compared_lines(measured)
    assert compared_lines(busy)[-1] == (
        "the host was busy while it was measured for predictions: run `penstock calibrate "
        "--forget` when it is idle"
    )


def test_report_says_what_other_programs_took_of_a_host_that_was_not_measured():
    measured = replace(report_of([9.0, 9.0, 4.0]), others_share=0.0, stolen_share=0.0)
    measured = replace(measured, predicted=None)
    assert busy_lines(measured) == busy_lines(replace(measured, others_share=0.04)) == []
    little = replace(measured, others_share=0.134)
    assert busy_lines(little) == ["meanwhile other programs took 13% of this machine's cores"]
    assert busy_lines(little)[0] in measured_lines(little)
    hint = "; steps of a small model may be faster beside them with engine.threads: 1"
    assert busy_lines(replace(measured, others_share=0.02, stolen_share=0.3)) == [
        "meanwhile other programs took 2% of this machine's cores, and its host gave 30% to others"
        + hint
    ]
    assert busy_lines(replace(measured, others_share=0.634)) == [
        f"meanwhile other programs took 63% of this machine's cores{hint}"
    ]


@pytest.mark.parametrize("has_workers", [False, True])
def test_use_of_the_cores_is_that_after_the_first_steps(monkeypatch, has_workers):
    times = iter([CoreUse(100, 50, 10, 5), CoreUse(120, 66, 16, 7)])
    monkeypatch.setattr(CoreUse, "now", lambda: next(times, None))
    report = RunReport(None, has_workers=has_workers)
    report(started())
    for number in range(1, 5):
        report(step(number, seconds=1.0))
    measured = report.measured(4.0)
    expected = (0.0, 0.0) if has_workers else (0.5, 0.1)
    assert (measured.others_share, measured.stolen_share) == expected


@pytest.mark.parametrize(
    ("predicted", "took", "shown"),
    [
        (0.0243, 0.0168, "24.3 ms and took 16.8 ms (-31%)"),
        (0.00775, 0.0133, "7.75 ms and took 13.3 ms (+72%)"),
        (58.0, 63.0, "58.0 s and took 63.0 s (+9%)"),
    ],
)
def test_compared_durations_share_a_unit_and_show_their_difference(predicted, took, shown):
    measured = report_of([9.0, 9.0, took])
    step_prediction = replace(PREDICTED, seconds=predicted)
    (line,) = compared_lines(replace(measured, predicted=step_prediction))
    assert f"was predicted to take {shown}" in line


@pytest.mark.parametrize("seconds", [[4.0], [4.0, 2.0]])
def test_run_of_few_steps_counts_them_all(seconds):
    measured = report_of(seconds)
    assert measured.usual_parts["compute_seconds"] == sum(seconds) / len(seconds) / 2
    assert compared_lines(measured) == []  # a plan does not predict compilation


def test_rows_of_older_releases_have_the_parts_of_all_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path)(report_of([10.0, 6.0, 1.0, 2.0, 3.0]))
    row = json.loads(path.read_text())
    del row["usual_parts"]
    assert "took 4.40 s (+340%): compute 0.90 s, was 2.20 s" in compared_lines(reported(row))[0]


def test_damaged_parts_are_no_report(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path)(report_of([1.0, 1.0, 1.0]))
    row = json.loads(path.read_text())
    assert reported({**row, "usual_parts": {"compute_seconds": "much"}}) is None
