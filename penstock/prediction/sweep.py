"""Predictions over the values of one key, and the fewest engines that make a deadline."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config import Config
from penstock.errors import BudgetError, ConfigError, PenstockError
from penstock.prediction.gpu_run import GpuRun
from penstock.prediction.predicted_run import Prediction
from penstock.progress import show_duration

_MOST_VALUES = 1000
_MOST_ENGINES = 1 << 16  # that a deadline may take, on a machine without a limit
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\+(\d+))?")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800, "year": 31536000}
_DEADLINE = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_SECONDS)})s?\s*")

COLUMNS = (
    "tokens_per_second",
    "step_seconds",
    "run_seconds",
    "engine_bytes",
    "host_bytes",
    "flash_read_bytes",
    "flash_written_bytes",
    "cost",
    "kilowatt_hours",
    "binding",
)


@dataclass(frozen=True)
class Sweep:
    """The values of a key, as `--sweep` names them; `omits_numbers` says whether a range doubles
    and so leaves numbers out."""

    key: str
    values: tuple[str, ...]
    omits_numbers: bool = False

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """Return the sweep that `engines=1..192` or `store.dram=1GiB,2GiB` stands for.

        `1..192` doubles from the first number on and ends with the last; `8..64+8` adds 8.

        Raises:
            ConfigError: the text is no sweep.
        """
        key, equals, values = text.partition("=")
        wanted = "expected KEY=VALUES such as engines=1..192, batch.size=8..64+8 or a=1,2"
        if not equals or not key or not values:
            raise ConfigError(f"--sweep: {wanted}, got {text!r}")
        found = _RANGE.fullmatch(values)
        if found is None:
            return cls(key, tuple(part.strip() for part in values.split(",")))
        first, last, step = (int(part) if part else 0 for part in found.groups())
        if first < 1 or last < first or (found[3] and step < 1):
            raise ConfigError(f"--sweep: {wanted}, with numbers from 1 up, got {text!r}")
        numbers = range(first, last + 1, step) if step else _doubling(first, last)
        if len(numbers) > _MOST_VALUES:
            raise ConfigError(
                f"--sweep: expected at most {_MOST_VALUES} values, got {len(numbers)}; choose a "
                "larger step"
            )
        omits_numbers = not step and len(numbers) < last - first + 1
        return cls(key, tuple(map(str, numbers)), omits_numbers)


def _doubling(first: int, last: int) -> list[int]:
    numbers = [first]
    while numbers[-1] * 2 < last:
        numbers.append(numbers[-1] * 2)
    return numbers if numbers[-1] == last else [*numbers, last]


@dataclass(frozen=True)
class Point:
    """One value of a sweep: its prediction, or why there is none."""

    value: str
    prediction: Prediction | GpuRun | None
    problem: str = ""


def run_sweep(
    config: Config, sweep: Sweep, plan: Callable[[Config], Prediction | GpuRun]
) -> list[Point]:
    """Return a point for each value.

    **Arguments:** `plan` returns the prediction of a configuration.

    Raises:
        ConfigError: no value gives a configuration, for example because there is no such key.
    """
    points: list[Point] = []
    problems: list[ConfigError] = []  # of the configurations
    for value in sweep.values:
        try:
            changed = Config.from_mapping(config.to_mapping(), [f"{sweep.key}={value}"])
        except ConfigError as error:
            problems.append(error)
            points.append(Point(value, None, str(error)))
            continue
        try:
            points.append(Point(value, plan(changed)))
        except PenstockError as error:
            points.append(Point(value, None, str(error)))
    if len(problems) == len(points):
        raise problems[0]
    return points


def row(prediction: Prediction | GpuRun) -> dict[str, Any]:
    """Return the figures of a prediction that a table compares, by column; None where a GPU cluster
    has no such figure."""
    price, seconds = prediction.price, prediction.run_seconds
    found: dict[str, Any] = dict.fromkeys(COLUMNS)
    found |= {
        "tokens_per_second": prediction.tokens_per_second,
        "step_seconds": prediction.step_seconds,
        "run_seconds": seconds,
        "cost": price.dollars(seconds),
        "kilowatt_hours": price.kilowatt_hours(seconds),
    }
    if isinstance(prediction, GpuRun):
        return found | {"engine_bytes": prediction.engine_bytes, "binding": prediction.binding}
    flash = prediction.flash
    return found | {
        "engine_bytes": prediction.plan.shares.engine_peak,
        "host_bytes": sum(prediction.plan.memory.values()),
        "flash_read_bytes": 0 if flash is None else flash.read_bytes,
        "flash_written_bytes": 0 if flash is None else flash.written_bytes,
        "binding": prediction.binding("step"),
    }


def as_csv(sweep: Sweep, points: Sequence[Point]) -> str:
    """Return the points as comma-separated values: seconds, bytes, US dollars, kWh."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([sweep.key, *COLUMNS, "problem"])
    for point in points:
        figures = {} if point.prediction is None else row(point.prediction)
        values = [figures.get(column) for column in COLUMNS]
        writer.writerow([point.value, *values, point.problem.replace("\n", " ")])
    return text.getvalue()


def parse_deadline(text: str) -> float:
    """Return the seconds of a duration such as `3 days` or `12 hours`.

    Raises:
        ConfigError: the text is no duration.
    """
    found = _DEADLINE.fullmatch(text)
    if found is None or float(found[1]) == 0:
        raise ConfigError(
            f"--target: expected a duration such as '3 days' or '12 hours', got {text!r}"
        )
    return float(found[1]) * _SECONDS[found[2]]


def fewest_engines(
    config: Config, most: int | None, seconds: float, plan: Callable[[Config], Prediction]
) -> Prediction:
    """Return the prediction with the smallest number of engines whose run ends within `seconds`.

    More engines than there are micro-batches have nothing to do, so the number is at most that.

    Args:
        most: engines that the machine can have.
        plan: returns the prediction of a configuration.

    Raises:
        BudgetError: no number of engines can hold a step.
        ConfigError: no number of engines is fast enough; the message says what the most of them do.
    """
    cap = min(most or _MOST_ENGINES, _most_micro_batches(config))
    tried = _Tried(config, plan)
    low, high = 0, 1  # so few are too few, and perhaps enough
    while tried.of(high) is None and high < cap:
        low, high = high, min(2 * high, cap)
    first = tried.of(high)
    if first is None:
        raise tried.problem
    limit = min(cap, first.plan.micro_batches)
    if first.run_seconds > seconds:
        low, high, best = high, limit, tried.of(limit)
        if best is None or best.run_seconds > seconds:
            took = show_duration((first if best is None else best).run_seconds)
            raise ConfigError(
                f"--target: {limit} engines, the most that {_limiting(first, most, limit)}, take "
                f"{took} for {config.run.steps:,} steps, expected {show_duration(seconds)}; raise "
                "batch.size and lower run.steps, or choose another machine"
            )
    while high - low > 1:
        middle = (low + high) // 2
        found = tried.of(middle)
        enough = found is not None and found.run_seconds <= seconds
        low, high = (low, middle) if enough else (middle, high)
    best = tried.of(high)
    assert best is not None
    return best


def _limiting(prediction: Prediction, most: int | None, limit: int) -> str:
    """Say what limits the engines to `limit`: the machine, its batch, both, or the search."""
    micro_batches = prediction.plan.micro_batches
    limits = [prediction.machine.name] if limit == most else []
    if limit == micro_batches:
        limits.append(f"a batch of {micro_batches} micro-batches")
    if not limits:
        return "are tried"
    return f"{' and '.join(limits)} {'allow' if len(limits) > 1 else 'allows'}"


class _Tried:
    """Predictions by the number of engines; None where a step does not fit so few."""

    def __init__(self, config: Config, plan: Callable[[Config], Prediction]) -> None:
        self._config, self._plan = config, plan
        self._found: dict[int, Prediction | None] = {}
        self.problem = BudgetError("nothing was tried")

    def of(self, engines: int) -> Prediction | None:
        if engines not in self._found:
            try:
                self._found[engines] = self._plan(
                    self._config.model_copy(update={"engines": engines})
                )
            except BudgetError as error:
                self.problem, self._found[engines] = error, None
        return self._found[engines]


def _most_micro_batches(config: Config) -> int:
    batch = config.batch
    return batch.size if batch.micro == "auto" else max(1, batch.size // int(batch.micro))
