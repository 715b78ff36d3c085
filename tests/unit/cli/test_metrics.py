"""The figures of a run on disk: each step once, readable by any JSON reader."""

import json
import math
import sys
from pathlib import Path

import pytest
from events_of_a_run import started, step

from penstock.errors import ConfigError
from penstock.events import Evaluated, Saved
from penstock.metrics import MetricsFile, TensorBoard, drop_after, read_metrics


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_object_per_step_evaluation_and_checkpoint(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    metrics = MetricsFile(path)
    for event in (
        started(),
        step(1, loss=2.5),
        Evaluated(1, 3.0, 20.1, 0.5, best=True, accuracy=0.25),
        Saved(1, Path("checkpoints/step-00000001"), 0.1, 1000),
    ):
        metrics(event)
    first, second, third = rows(path)
    assert first["event"] == "step"
    assert (first["step"], first["loss"], first["tokens"]) == (1, 2.5, 16384)
    assert (second["event"], second["loss"], second["best"]) == ("evaluation", 3.0, True)
    assert (second["accuracy"], second["exact_match"]) == (0.25, None)
    assert (third["event"], third["path"]) == ("checkpoint", "checkpoints/step-00000001")


def test_after_a_resume_each_step_stands_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    interrupted = MetricsFile(path)
    interrupted(started())
    for number in range(1, 8):
        interrupted(step(number, loss=1.0))
    interrupted(Evaluated(6, 3.0, 20.1, 0.5, best=True))
    with path.open("a") as file:
        file.write('{"event": "step", "st')  # as a crash may leave it
    resumed = MetricsFile(path)
    resumed(started(resumed_from=5))
    for number in range(6, 9):
        resumed(step(number, loss=2.0))
    found = rows(path)
    assert [row["step"] for row in found] == list(range(1, 9))
    assert [row["loss"] for row in found] == [1.0] * 5 + [2.0] * 3
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_starts_its_file_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 3}\n')
    MetricsFile(path)(started(resumed_from=None))
    assert rows(path) == []


def test_nothing_is_rewritten_where_nothing_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event":   "step", "step": 3}\n')
    assert drop_after(path, 3) == 0
    assert path.read_text() == '{"event":   "step", "step": 3}\n'
    assert drop_after(tmp_path / "absent", 3) == 0


def test_what_json_lacks_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path)(step(1, loss=math.nan))
    MetricsFile(path)(step(2, loss=math.inf))
    assert [row["loss"] for row in rows(path)] == [None, None]
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_the_same_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board(started())
    for number in (1, 2, 3):
        board(step(number, loss=4.0 / number))
    board(Evaluated(3, 1.5, 4.48, 0.5, best=True))
    board.close()
    board.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    losses = {entry.step: entry.value for entry in read.Scalars("train/loss")}
    assert losses == pytest.approx({1: 4.0, 2: 2.0, 3: 4 / 3})
    assert read.Scalars("speed/tokens_per_second")[0].value == 8192
    assert read.Scalars("evaluation/loss")[0].value == 1.5


def test_a_missing_tensorboard_is_named_with_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError) as raised:
        TensorBoard(tmp_path)
    assert str(raised.value) == (
        "logging.tensorboard: expected the package tensorboard, which is not installed; run "
        "`pip install 'penstock[tensorboard]'` or set logging.tensorboard to false"
    )
