"""Lines of `penstock inspect` about a run's configuration, its progress, and the cycles of a step
on a simulated wafer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.cycle_table import HEADINGS, NAME_WIDTH, cycle_columns, name_column
from penstock.progress import busy_lines, compared_lines, cycle_lines, show_shares

if TYPE_CHECKING:
    from penstock.config import Config


def configuration_lines(settings: Config) -> list[str]:
    """Return lines about the model, the training and what decides the trajectory."""
    from penstock.config import digest, dump_inline

    model = settings.to_mapping()["model"]
    schedule = settings.optimizer.schedule.name
    return [
        f"run          {settings.run.dir}",
        f"model        {dump_inline(model) if model is not None else 'given from Python'}",
        f"training     {settings.run.steps} steps of {settings.batch.size} sequences, "
        f"{settings.precision}, {settings.optimizer.name} {settings.optimizer.learning_rate:g} "
        f"{schedule}, seed {settings.run.seed}",
        f"trajectory   {digest(settings)}",
    ]


def progress_lines(run: Path, saved: int | None) -> list[str]:
    """Return lines about the last step, the evaluations, the prediction and the cycles.

    `saved` is the step of the run's newest state.
    """
    from penstock.telemetry import reported, stream_metrics

    step: dict | None = None
    report: dict | None = None
    last: dict | None = None
    best: dict | None = None
    for row in stream_metrics(run / "metrics.jsonl"):  # as many rows as the run has steps
        if row.get("event") == "step":
            step = row
        elif row.get("event") == "report":
            report = row
        elif row.get("event") == "evaluation":
            last = row
            if best is None or _or_infinity(row.get("loss")) < _or_infinity(best.get("loss")):
                best = row
    lines = []
    if step is not None:
        lines.append(f"progress     step {step['step']}, loss {_loss(step)}")
    if last is not None and best is not None:
        lines.append(
            f"held out     loss {_loss(last)} at step {last['step']}, "
            f"best {_loss(best)} at step {best['step']}"
            + show_shares(_share(last, "accuracy"), _share(last, "exact_match"))
        )
    if step is not None and saved is not None and saved < step["step"]:
        lines.append(
            f"saved        step {saved}, the newest saved one: a start from it repeats "
            + _steps(saved + 1, step["step"])
        )
    measured = None if report is None else reported(report)
    if measured is not None:
        lines += [f"prediction   {line}" for line in compared_lines(measured)]
        lines += [f"machine      {line}" for line in busy_lines(measured)]
        lines += [f"wafer        {line}" for line in cycle_lines(measured)]
    if step is not None:
        lines += _stage_lines(step)
    return lines


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _stage_lines(row: Mapping[str, Any]) -> list[str]:
    """Return a line for each stage of a step on a simulated wafer; none if the row has none, or is
    damaged."""
    cycles = row.get("cycles")
    stages = cycles.get("stages") if isinstance(cycles, dict) else None
    if not isinstance(cycles, dict) or not isinstance(stages, dict):
        return []
    lines = [
        f"cycles       of step {row['step']} on {cycles.get('mesh')} cores ({cycles.get('cores')})",
        f"             {'stage':<{NAME_WIDTH}}{HEADINGS}",
    ]
    for name, sweeps in stages.items():
        found = {sweep: _figures(each) for sweep, each in _items(sweeps)}
        totals = {sweep: sum(figures.values()) for sweep, figures in found.items()}
        simulated = sum(figures.get("simulated", 0.0) for figures in found.values())
        share = f"{simulated / sum(totals.values()):.0%} simulated" if simulated else "closed form"
        lines.append(f"             {name_column(name)}{cycle_columns(totals)}  {share}")
    return lines


def _figures(value: Any) -> dict[str, float]:
    """Return the numbers of a record, by name."""
    return {name: float(n) for name, n in _items(value) if isinstance(n, float | int)}


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _share(row: dict, name: str) -> float | None:
    share = row.get(name)
    return share if isinstance(share, float) else None


def _loss(row: dict) -> str:
    value = row.get("loss")
    unit = " nats per token" if row.get("accuracy") is not None else ""  # of language models
    return "not finite" if value is None else f"{value:.4f}{unit}"


def _or_infinity(value: float | None) -> float:
    return math.inf if value is None else value
