"""The runs of this host that were predicted: how near the predictions were.

A run leaves a line of JSON in a file beside the measurements of the host. New measurements begin
with an empty file, since the predictions came from the old ones.
"""

import contextlib
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from penstock.calibration.host_key import HostKey, kept_file
from penstock.errors import StorageError
from penstock.io import durable, read_plain
from penstock.machines import Accuracy

MOST_RUNS = 200
"""Older ones are forgotten."""

ENOUGH_RUNS = 10
"""Fewer do not say between which figures nine of ten lie."""

_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class MeasuredRun:
    """A run on this host: what was predicted of a step, and what happened.

    Attributes:
        date: of the run's end.
        model: its name.
        predicted_seconds, seconds: of a step; the median was measured.
        predicted_bytes, peak_bytes: resident memory of the process at its peak; 0 is predicted of a
            run in several processes.
    """

    date: str
    model: str
    predicted_seconds: float
    seconds: float
    predicted_bytes: int
    peak_bytes: int

    @property
    def ratio(self) -> float:
        """The measured time of a step over the predicted one."""
        return self.seconds / self.predicted_seconds


def runs_file(key: HostKey) -> Path:
    """Return the file in which the runs of a host are kept."""
    return kept_file(key).with_suffix(".runs.jsonl")


def keep_run(run: MeasuredRun, key: HostKey) -> None:
    """Add a run to those of its host.

    Raises:
        StorageError: the system refuses to write the file.
    """
    path = runs_file(key)
    runs = [*kept_runs(key), run][-MOST_RUNS:]
    text = "".join(json.dumps(asdict(each)) + "\n" for each in runs)
    temporary = path.with_name(f"{durable.TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error


def kept_runs(key: HostKey) -> list[MeasuredRun]:
    """Return the runs of a host, the oldest first; damaged lines, and a file that cannot be read,
    count as none."""
    try:
        data = read_plain(runs_file(key), _MAX_BYTES)
    except OSError:
        return []
    found = (_parsed(line) for line in data.decode(errors="replace").splitlines())
    return [run for run in found if run is not None]


def accuracy_of(runs: Sequence[MeasuredRun], source: str) -> Accuracy | None:
    """Return the interval in which nine of ten of the runs lay; None if they are too few.

    Args:
        runs: the measured runs.
        source: says where they are kept.
    """
    if len(runs) < ENOUGH_RUNS:
        return None
    twentieths = statistics.quantiles([run.ratio for run in runs], n=20, method="inclusive")
    low, high = round(twentieths[0], 3), round(twentieths[-1], 3)
    return Accuracy(low=low, high=high, runs=len(runs), source=source)


def _parsed(line: str) -> MeasuredRun | None:
    try:
        values = json.loads(line)
        run = MeasuredRun(**{field.name: values[field.name] for field in fields(MeasuredRun)})
        ratio = run.ratio
    except (ValueError, KeyError, TypeError, ArithmeticError):
        return None
    return run if math.isfinite(ratio) and ratio > 0 else None
