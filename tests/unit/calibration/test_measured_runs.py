"""Measured runs of a host: kept, read back, and the interval of nine in ten of them."""

from __future__ import annotations

import dataclasses
import json

import pytest
from measured_host import host

from penstock.calibration import (
    HostKey,
    MeasuredRun,
    accuracy_of,
    keep,
    keep_run,
    kept_machine,
    kept_runs,
    runs_file,
)
from penstock.calibration.measured_runs import ENOUGH_RUNS, MOST_RUNS
from penstock.errors import StorageError

KEY = HostKey("A processor", 2, "2.13.0", "0.62.0", "1.abcdef01")
RUN = MeasuredRun("2026-11-23", "gpt2", 2.0, 2.2, 10**9, 11 * 10**8)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep(host(), KEY)


def took(ratio):
    return dataclasses.replace(RUN, seconds=RUN.predicted_seconds * ratio)


def test_runs_are_read_back_in_order():
    keep_run(RUN, KEY)
    keep_run(took(0.9), KEY)
    assert kept_runs(KEY) == [RUN, took(0.9)]


def test_the_oldest_runs_are_forgotten():
    keep_run(RUN, KEY)
    runs_file(KEY).write_text(runs_file(KEY).read_text() * (MOST_RUNS + 3))
    keep_run(took(0.5), KEY)
    found = kept_runs(KEY)
    assert len(found) == MOST_RUNS
    assert found[-1] == took(0.5)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "1",
        '{"date": 1}',
        "\xff",
        '{"predicted_seconds": 0}',
        json.dumps({**dataclasses.asdict(RUN), "predicted_seconds": 1, "seconds": 10**400}),
    ],
    ids=range(8),
)
def test_a_damaged_line_counts_as_no_run(line):
    keep_run(RUN, KEY)
    with runs_file(KEY).open("a", encoding="latin-1") as file:
        file.write(line + "\n")
    assert kept_runs(KEY) == [RUN]
    keep_run(RUN, KEY)
    assert kept_runs(KEY) == [RUN, RUN]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_run_with_an_impossible_time_counts_as_no_run(seconds):
    keep_run(dataclasses.replace(RUN, seconds=seconds), KEY)
    assert kept_runs(KEY) == []


def test_the_interval_contains_nine_of_ten_runs():
    ratios = [0.5, *(1 + number / 100 for number in range(18)), 3.0]
    found = accuracy_of([took(ratio) for ratio in ratios], "here")
    assert sum(found.low <= ratio <= found.high for ratio in ratios) == 18
    assert (found.runs, found.source) == (20, "here")


def test_few_runs_give_no_interval():
    assert accuracy_of([RUN] * (ENOUGH_RUNS - 1), "here") is None
    assert accuracy_of([RUN] * ENOUGH_RUNS, "here") is not None


def test_new_measurements_begin_without_runs():
    for _ in range(ENOUGH_RUNS):
        keep_run(RUN, KEY)
    assert kept_machine(KEY).accuracy.runs == ENOUGH_RUNS
    keep(host(rate=2.0), KEY)
    assert kept_machine(KEY).accuracy is None


def test_a_file_that_cannot_be_written_is_an_error_of_ours():
    runs_file(KEY).mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        keep_run(RUN, KEY)
