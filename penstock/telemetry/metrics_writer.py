"""The metrics of a run on disk: `metrics.jsonl`.

Each step has one row. On resume, the rows of steps after the last checkpoint are dropped, because
those steps are repeated. The file grows with the run, so no function here holds more than one line
in memory, except `read_metrics`.
"""

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from penstock.errors import StorageError
from penstock.io import NotPlainError, durable, open_plain
from penstock.telemetry.events import (
    ClusterEvent,
    Evaluated,
    Event,
    PredictedStep,
    RunMeasured,
    RunStarted,
    Saved,
    StepCycles,
    StepDone,
)

_PIECE_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20  # a row has some kilobytes at most; longer lines are damaged
# Rows that may follow the rows of later steps: a checkpoint is completed in the background.
_OUT_OF_ORDER = ("checkpoint", "report")


class MetricsFile:
    """Appends a JSON object per step, evaluation, checkpoint, cluster event, and run.

    A listener for events. Every line has `event` and `step`. The whole line is in the file when the
    call returns. NaN and infinity, which JSON lacks, are written as null.

    **Raises:** `StorageError` if the system refuses the write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._newest = 0

    def __call__(self, event: Event) -> None:
        try:
            self._record(event)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot write metrics: {error.strerror}") from error

    def _record(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._newest = event.resumed_from or 0
            drop_after(self.path, self._newest)
        elif isinstance(event, StepDone):
            if event.step <= self._newest:  # repeated after a rollback of the store
                drop_after(self.path, event.step - 1)
            self._newest = event.step
            self._append("step", event)
        elif isinstance(event, Evaluated):
            self._append("evaluation", event)
        elif isinstance(event, Saved):
            self._append("checkpoint", event)
        elif isinstance(event, ClusterEvent):
            self._append("cluster", event)
        elif isinstance(event, RunMeasured):
            self._append("report", event)

    def _append(
        self, name: str, event: StepDone | Evaluated | Saved | ClusterEvent | RunMeasured
    ) -> None:
        line = json.dumps({"event": name} | {k: _plain(v) for k, v in vars(event).items()})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def stream_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file in order; skip torn and damaged lines.

    **Raises:** `StorageError` if the path is not a regular file.
    """
    file = _opened(path)
    if file is None:
        return
    with file:
        for line in _lines_from(file, 0):
            row = _row(line)
            if row is not None:
                yield row


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all rows of a metrics file at once; errors as of `stream_metrics`."""
    return list(stream_metrics(path))


def drop_after(path: Path, step: int) -> int:
    """Remove the rows of steps after `step` and damaged lines among them; return how many lines.

    Rows of cluster events stay: a step may be repeated, but the loss of a node has happened. The
    file is read from its end, back to the last row of a step or an evaluation that stays. After a
    crash the file has its old or its new content.

    **Raises:** `OSError` if the system refuses the write; `StorageError` as `stream_metrics`.
    """
    file = _opened(path)
    if file is None:
        return 0
    with file:
        cut, dropped = 0, 0
        for begin, line in _lines_from_end(file):
            row = _row(line)
            if row is None or not _stays(row, step):
                dropped += bool(line)
            elif row.get("event") not in ("cluster", *_OUT_OF_ORDER):
                cut = begin + len(line)
                break
        if dropped or not _ends_with_line(file):
            durable.put_pieces(path, _kept(file, cut, step))
    return dropped


def _kept(file: BinaryIO, cut: int, step: int) -> Iterator[bytes]:
    """Yield the first `cut` bytes, which end at a line's end, and the rows after them that stay."""
    file.seek(0)
    left = cut
    while left and (piece := file.read(min(left, _PIECE_BYTES))):
        left -= len(piece)
        yield piece
    if cut:
        yield b"\n"
    for line in _lines_from(file, cut):
        row = _row(line)
        if row is not None and _stays(row, step):
            yield line + b"\n"


def _opened(path: Path) -> BinaryIO | None:
    try:
        return open_plain(path)
    except FileNotFoundError:
        return None
    except NotPlainError as error:
        raise StorageError(f"{path}: {error.strerror}") from error


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line; None for a torn or damaged line.

    A damaged row is no error: rows are for display, not state of the run.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if (
        isinstance(row, dict)
        and type(row.get("step")) is int
        and isinstance(row.get("loss", None), float | int | None)
    ):
        return row
    return None


def _stays(row: dict[str, Any], step: int) -> bool:
    """Return whether a row is still valid when the steps after `step` are repeated."""
    return row["step"] <= step or row.get("event") == "cluster"


def _lines_from(file: BinaryIO, begin: int) -> Iterator[bytes]:
    """Yield the lines after byte `begin`, without line ends; very long lines are truncated."""
    file.seek(begin)
    rest = b""
    while piece := file.read(_PIECE_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        rest = rest[:_LONGEST_LINE_BYTES]
    yield rest


def _lines_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the start and content of each line, the last line first; otherwise as `_lines_from`."""
    position, rest = file.seek(0, os.SEEK_END), b""
    while position:
        size = min(position, _PIECE_BYTES)
        position -= size
        file.seek(position)
        lines = (file.read(size)).split(b"\n")
        begins = [position]
        for line in lines[:-1]:
            begins.append(begins[-1] + len(line) + 1)
        lines[-1] += rest
        for begin, line in zip(reversed(begins[1:]), reversed(lines[1:]), strict=True):
            yield begin, line
        rest = lines[0][:_LONGEST_LINE_BYTES]
    yield 0, rest


def _ends_with_line(file: BinaryIO) -> bool:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 1))
    return size == 0 or file.read(1) == b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, PredictedStep | StepCycles):
        return {key: _plain(each) for key, each in vars(value).items()}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return str(value) if isinstance(value, Path) else value


def reported(row: Mapping[str, Any]) -> RunMeasured | None:
    """Return the event that a row of the report stands for; None if its figures are damaged."""
    figures = {key: value for key, value in row.items() if key != "event"}
    predicted, parts = figures.pop("predicted", None), figures.pop("usual_parts", {})
    tables = [table.values() for table in (predicted, parts) if isinstance(table, dict)]
    numbers = [*figures.values(), *itertools.chain(*tables)]
    if not all(value is None or type(value) in (int, float) for value in numbers):
        return None
    try:
        step = PredictedStep(**predicted) if isinstance(predicted, dict) else None
        usual = parts if isinstance(parts, dict) and None not in parts.values() else {}
        found = RunMeasured(**figures, predicted=step, usual_parts=usual)
    except TypeError:
        return None
    divisors = [found.step_seconds, found.steps, *([] if step is None else [step.seconds])]
    return found if all(number is not None and number > 0 for number in divisors) else None
