"""The figures of a run on disk: each step once, readable by any JSON reader."""

import errno
import json
import math
import os
import random
import sys
from pathlib import Path

import pytest
from bounded_memory import bounded_memory
from events_of_a_run import started, step

from penstock.errors import ConfigError, StorageError
from penstock.io import durable
from penstock.telemetry.events import Evaluated, Saved
from penstock.telemetry.metrics_writer import (
    MetricsFile,
    _lines_from,
    _lines_from_end,
    drop_after,
    read_metrics,
    stream_metrics,
)
from penstock.telemetry.run_files import RunFiles
from penstock.telemetry.tensorboard_files import TensorBoard


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_have_one_object_per_event(tmp_path):
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


def test_resumed_run_records_each_step_once(tmp_path):
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


def test_checkpoint_completed_after_later_steps_does_not_keep_their_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    saved = Saved(5, Path("checkpoints/step-00000005"), 0.1, 1000)
    interrupted = MetricsFile(path)
    interrupted(started())
    for number in range(1, 8):
        interrupted(step(number))
    interrupted(Evaluated(7, 3.0, 20.1, 0.5, best=True))
    interrupted(saved)
    interrupted(step(8))
    resumed = MetricsFile(path)
    resumed(started(resumed_from=5))
    for number in range(6, 10):
        resumed(step(number))
    found = [(row["event"], row["step"]) for row in rows(path)]
    assert found == [
        *(("step", number) for number in range(1, 6)),
        ("checkpoint", 5),
        *(("step", number) for number in range(6, 10)),
    ]


def test_report_and_checkpoints_of_kept_steps_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    order = "step1 step2 checkpoint1 report2 cluster2 step3 checkpoint2 evaluation3 checkpoint3"
    lines = [json.dumps({"event": name[:-1], "step": int(name[-1])}) for name in order.split()]
    path.write_text("\n".join([*lines, '{"event": "st']))
    assert drop_after(path, 2) == 4
    assert path.read_text().splitlines() == [*lines[:5], lines[6]]
    assert drop_after(path, 2) == 0
    assert drop_after(path, 1) == 3
    assert path.read_text().splitlines() == [lines[0], lines[2], lines[4]]


def crashed_after(metrics, draw, resumed_from, most_steps):
    """Send the events of a process that ends at any event; return what a resume must keep.

    Checkpoints are begun at any step and completed some steps later, as those in the background.
    """
    metrics(started(resumed_from=resumed_from))
    newest = resumed_from or 0
    sent, durable_step, pending = [], newest, None
    for number in range(newest + 1, newest + 1 + draw.randrange(most_steps)):
        events = [step(number)]
        if number % 3 == 0:
            events.append(Evaluated(number, 3.0, 20.1, 0.5, best=False))
        if pending is not None and draw.random() < 0.3:
            durable_step, pending = pending, None
            if draw.random() < 0.9:  # otherwise the process ends between checkpoint and row
                events.insert(1, Saved(durable_step, Path("checkpoints/step"), 0.1, 1000))
        if pending is None and draw.random() < 0.3:
            pending = number
        for event in events:
            metrics(event)
            sent.append((type(event).__name__, event.step))
    return [event for event in sent if event[1] <= durable_step], durable_step or None


@pytest.mark.parametrize("seed", range(40))
def test_each_row_is_recorded_once_over_crashes_and_resumes(tmp_path, seed):
    names = {"step": "StepDone", "evaluation": "Evaluated", "checkpoint": "Saved"}
    draw = random.Random(seed)
    path = tmp_path / "metrics.jsonl"
    kept, resumed_from = [], None
    for _ in range(6):
        sent, resumed_from = crashed_after(MetricsFile(path), draw, resumed_from, 25)
        kept += sent
        if draw.random() < 0.5:
            with path.open("ab") as file:  # as a crash or a power cut may leave the end
                file.write(draw.choice([b'{"event": "step", "st', b"\0" * 70_000, b"\n\n{"]))
    MetricsFile(path)(started(resumed_from=resumed_from))
    assert [(names[row["event"]], row["step"]) for row in rows(path)] == kept, f"seed {seed}"
    recorded = [row["step"] for row in rows(path) if row["event"] == "step"]
    assert recorded == list(range(1, (resumed_from or 0) + 1)), f"seed {seed}"


def test_new_run_starts_new_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 3}\n')
    MetricsFile(path)(started(resumed_from=None))
    assert rows(path) == []


def test_file_without_dropped_rows_is_not_rewritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event":   "step", "step": 3}\n')
    assert drop_after(path, 3) == 0
    assert path.read_text() == '{"event":   "step", "step": 3}\n'
    assert drop_after(tmp_path / "absent", 3) == 0


def test_drop_after_keeps_cluster_events_and_ends_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kinds = ["step", "cluster", "step", "checkpoint", "cluster", "step", "cluster", "step"]
    lines = [json.dumps({"event": kind, "step": at}) for at, kind in enumerate(kinds)]
    path.write_text("\n".join(lines))  # a crash took the end of the last line
    assert drop_after(path, 7) == 0
    assert path.read_text() == "\n".join(lines) + "\n"
    assert drop_after(path, 3) == 2
    assert path.read_text().splitlines() == [*lines[:5], lines[6]]
    assert drop_after(path, -1) == 3
    assert path.read_text().splitlines() == [lines[1], lines[4], lines[6]]


@pytest.mark.parametrize("seed", range(5))
def test_lines_are_equal_from_both_ends(tmp_path, seed):
    """Against Python's own splitting, with lines around the size of the pieces that are read."""
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 40, 65_535, 65_536, 65_537, 200_000]) for _ in range(12)]
    lines = [bytes(draw.choices(b"abc", k=size)) for size in sizes]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(lines))
    begins = [sum(map(len, lines[:at])) + at for at in range(len(lines))]
    with path.open("rb", buffering=0) as file:
        assert list(_lines_from(file, 0)) == lines
        backwards = list(_lines_from_end(file))
    assert backwards[::-1] == list(zip(begins, lines, strict=True))


def read_bytes():
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.long
def test_reading_long_metrics_uses_bounded_memory(tmp_path):
    """300,000 steps, as much as a week of small steps writes: 220 MB."""
    path = tmp_path / "metrics.jsonl"
    row = json.dumps({"event": "step", **vars(step(1234567))})
    with path.open("w") as file:
        file.writelines(row.replace("1234567", str(at)) + "\n" for at in range(1, 300_001))
    before = read_bytes()
    with bounded_memory(32 << 20):
        assert drop_after(path, 300_000) == 0
        assert read_bytes() - before < 1 << 20
        assert sum(1 for row in stream_metrics(path)) == 300_000
        assert drop_after(path, 299_000) == 1000
        assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]
    with path.open("rb") as file:
        file.seek(-1000, 2)
        assert json.loads(file.read().splitlines()[-1])["step"] == 299_000


@pytest.mark.long
def test_endless_line_uses_bounded_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        file.write('{"event": "step", "step": 1}\n')
    os.truncate(path, 2**28)
    with bounded_memory(32 << 20):
        assert len(list(stream_metrics(path))) == 1
        assert drop_after(path, 1) == 1
    assert path.read_text() == '{"event": "step", "step": 1}\n'


class Full:
    """A listener whose disk is full from step 2 on."""

    def __init__(self):
        self.told = []

    def __call__(self, event):
        self.told.append(event)
        if getattr(event, "step", 0) >= 2:
            raise StorageError("metrics.jsonl: cannot write metrics: No space left on device")


def test_unwritable_metrics_request_one_stop():
    asked, full, other = [], Full(), []
    recorder = RunFiles([full, other.append], asked.append)
    for event in (started(), step(1), step(2), step(3)):
        recorder(event)
    assert asked == ["metrics.jsonl: cannot write metrics: No space left on device"]
    assert str(recorder.failure) == (
        "metrics.jsonl: cannot write metrics: No space left on device; the run was saved and "
        "stopped: free space there, then give the same command again to resume"
    )
    assert len(full.told) == 3
    assert len(other) == 2


@pytest.mark.parametrize("at", ["events", "step"])
def test_full_disk_under_tensorboard_is_storage_error(tmp_path, monkeypatch, at):
    board, write = TensorBoard(tmp_path), durable.write

    def refuse(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    if at == "step":
        board(started())
    monkeypatch.setattr(durable, "write", refuse)
    with pytest.raises(StorageError) as caught:
        board(step(1) if at == "step" else started())
    monkeypatch.setattr(durable, "write", write)
    assert str(caught.value) == (
        f"{tmp_path}: cannot write the metrics for TensorBoard: No space left on device"
    )
    board.close()


def test_non_finite_numbers_are_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path)(step(1, loss=math.nan))
    MetricsFile(path)(step(2, loss=math.inf))
    assert [row["loss"] for row in rows(path)] == [None, None]
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_same_metrics(tmp_path):
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_repeated_steps_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board(started())
    for number in (1, 2, 3, 4):
        board(step(number, loss=4.0 / number))
        board(Evaluated(number, 1.5, 4.48, 0.5, best=False))
    for number in (3, 4, 5):  # the store was rolled back to step 2
        board(step(number, loss=4.0 / number))
        board(Evaluated(number, 1.5, 4.48, 0.5, best=False))
    board.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [entry.step for entry in read.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert [entry.step for entry in read.Scalars("evaluation/loss")] == [1, 2, 3, 4, 5]


def test_missing_tensorboard_names_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(ConfigError) as raised:
        TensorBoard(tmp_path)
    assert str(raised.value) == (
        "logging.tensorboard: expected the package tensorboard, which is not installed; give "
        "`python -m pip install '.[tensorboard]'` in the clone of Penstock, or set "
        "logging.tensorboard to false"
    )
