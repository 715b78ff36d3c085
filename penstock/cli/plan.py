"""`penstock plan`: whether a run fits, how long it takes, what binds it, and what would help."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.cli.arguments import ConfigArgument, Overrides, configuration
from penstock.cli.figure import figure
from penstock.errors import ConfigError, PenstockError
from penstock.garbage_collection import collection_disabled

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from penstock.config import Config
    from penstock.machines import GpuCluster, MachineDescription
    from penstock.prediction import Advice, GpuRun, Planner, Point, Prediction, Sweep

    Found = Prediction | GpuRun


class _ContextOfDefault(typer.Context):
    """Help and errors of the command that needs no name call it as users do."""

    @property
    def command_path(self) -> str:
        assert self.parent is not None
        return self.parent.command_path


class _Default(TyperCommand):
    """The command of a group that is meant if none is named."""

    context_class = _ContextOfDefault


class _PlanByDefault(TyperGroup):
    """`plan CONFIG` means `plan run CONFIG`; `plan figure NAME` is a command of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] != ["figure"]:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_PlanByDefault, help="Predict a run: memory, time, traffic, cost.")
app.command("figure")(figure)


@app.command("run", cls=_Default)
def plan(
    config: ConfigArgument,
    overrides: Overrides = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            "--machine",
            metavar="NAME",
            help="Known machine, GPU cluster, or file of one; repeat it to compare. Default: this "
            "host, as measured by `penstock calibrate`.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="One line per value: engines=1..192 doubles (1, 2, 4, ... 128, 192), "
            "batch.size=8..64+8 adds 8, store.dram=1GiB,2GiB lists.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="Find the fewest engines that end the run in time: '3 days'."
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the sweep as comma-separated values.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the sweep (.png or .svg); needs the extra `plot`."),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print JSON: one object per machine.")
    ] = False,
) -> None:
    """Predict the run of CONFIG: memory, time of a step and of the run, traffic, cost.

    Decisions and refusals are those of `penstock train`. Nothing is trained, and no weights are
    created. Pictures: `penstock plan figure --help`.
    """
    settings = configuration(config, overrides)
    with collection_disabled(freeze=True):
        from penstock.prediction import Planner, Sweep, parse_deadline

    swept = Sweep.parse(sweep) if sweep else None
    seconds = parse_deadline(target) if target else None
    _check_files(csv, plot, has_sweep=swept is not None)
    if swept and target:
        raise ConfigError("--target: expected no --sweep beside it; use one of them")
    if swept and len(machine or ()) > 1:
        raise ConfigError("--sweep: expected one --machine, got several; run it for each of them")

    console = _console()
    planner = Planner(_notice, remember=True)
    described = _machines(machine, settings)
    if swept is not None:
        plan_on = _planned_on(planner, *described[0])
        _sweep(console, settings, swept, plan_on, csv, plot, json_output)
        return
    found: list[tuple[str, Found | PenstockError]] = []
    for one, is_here in described:
        try:
            found.append((one.name, _planned_on(planner, one, is_here, seconds)(settings)))
        except PenstockError as error:
            if len(described) == 1:
                raise
            found.append((one.name, error))
    _print(console, found, partial(planner.advice, is_here=not machine), json_output, seconds)


def _check_files(csv: Path | None, plot: Path | None, *, has_sweep: bool) -> None:
    from penstock.pictures import check_name

    for name, file in (("--csv", csv), ("--plot", plot)):
        if file is not None and not has_sweep:
            raise ConfigError(f"{name}: expected --sweep beside it, got none")
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{name}: expected a file in a folder that exists, got {file}")
    if plot is not None:
        check_name(plot)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=100)


def _notice(text: str) -> None:
    typer.echo(f"note: {text}", err=True)


def _note_missing_data(config: Config) -> None:
    """Note that the data of a run is not here, without which `penstock train` refuses the run."""
    from penstock.config import check_data

    if config.data.path is None and not config.data.input:
        return  # a model alone
    try:
        check_data(config)
    except ConfigError as error:
        _notice(f"`penstock train` would refuse this run: {error}")


def _machines(
    names: list[str] | None, config: Config
) -> list[tuple[MachineDescription | GpuCluster, bool]]:
    """Return the machines, each with whether it is this host, whose data is looked for."""
    from penstock.machines import load_any

    if names:
        return [(load_any(name), False) for name in names]
    from penstock.calibration import this_host

    _note_missing_data(config)
    return [(this_host(notice=_notice), True)]


def _planned_on(
    planner: Planner,
    machine: MachineDescription | GpuCluster,
    is_here: bool,
    seconds: float | None = None,
) -> Callable[[Config], Found]:
    """Return what predicts on a machine; with the fewest engines, if the run has a deadline."""
    from penstock.machines import GpuCluster
    from penstock.prediction import fewest_engines

    if isinstance(machine, GpuCluster):
        return lambda config: planner.plan_on_gpus(config, machine, seconds)

    def plan_on(config: Config) -> Prediction:
        return planner.plan(config, machine, is_here=is_here)

    if seconds is None:
        return plan_on
    return lambda config: fewest_engines(config, machine.engine.most, seconds, plan_on)


def _sweep(
    console: Console,
    settings: Config,
    sweep: Sweep,
    plan_on: Callable[[Config], Found],
    csv: Path | None,
    plot: Path | None,
    json_output: bool,
) -> None:
    from penstock.prediction import Prediction, as_csv, plot_sweep, row, run_sweep

    points = run_sweep(settings, sweep, plan_on)
    if json_output:
        for point in points:
            found = point.prediction
            figures: dict[str, Any] = {"problem": point.problem}
            if found is not None:
                notes = {"sequence_length_note": found.length_note}
                if isinstance(found, Prediction):
                    notes["accuracy_note"] = found.accuracy_note
                    notes["full_disk_note"] = found.full_disk_note
                figures = {**row(found), **notes}
            typer.echo(json.dumps({sweep.key: point.value, **figures}))
    else:
        _print_table(console, sweep.key, points)
        if sweep.omits_numbers:
            given = f"{sweep.key}={sweep.values[0]}..{sweep.values[-1]}"
            note = f"{given} doubles; {given}+N adds N"
            console.print(note, markup=False, highlight=False)
    if csv is not None:
        csv.write_text(as_csv(sweep, points))
    if plot is not None:
        plot_sweep(sweep, points, plot)


def _print(
    console: Console,
    found: list[tuple[str, Found | PenstockError]],
    advise: Callable[[Prediction], list[Advice]],
    json_output: bool,
    target: float | None,
) -> None:
    """Print predictions, and with a target the answer to it: the fewest engines."""
    from penstock.prediction import GpuRun, as_json

    if json_output:
        for name, each in found:
            if isinstance(each, PenstockError):
                typer.echo(json.dumps({"machine": name, "problem": str(each)}))
            elif isinstance(each, GpuRun):
                typer.echo(json.dumps(each.as_json()))
            else:
                typer.echo(json.dumps(as_json(each, advise(each))))
        return
    _print_pages(console, found, advise)
    if target is not None:
        _print_fewest(console, found, target)


def _print_pages(
    console: Console,
    found: list[tuple[str, Found | PenstockError]],
    advise: Callable[[Prediction], list[Advice]],
) -> None:
    """Print the page of a machine, or one line for each of several."""
    from penstock.prediction import GpuRun, Point, page

    if len(found) == 1:
        _, only = found[0]
        assert not isinstance(only, PenstockError)
        if isinstance(only, GpuRun):
            console.print("\n".join(only.lines()), highlight=False)
        else:
            console.print(page(only, advise(only)))
        return
    points = [
        Point(name, None, str(each)) if isinstance(each, PenstockError) else Point(name, each)
        for name, each in found
    ]
    _print_table(console, "machine", points)


def _print_fewest(
    console: Console, found: list[tuple[str, Found | PenstockError]], seconds: float
) -> None:
    """Print the answer to `--target`, one line per machine."""
    from penstock.progress import show_duration

    for name, each in found:
        if isinstance(each, PenstockError):
            continue
        engines = each.config.engines
        what = f"one engine of {name} is enough"
        if engines > 1:
            what = f"{engines:,} engines are the fewest of {name}"
        console.print(
            f"--target: {what} to end the run within {show_duration(seconds)}: in "
            f"{show_duration(each.run_seconds)}.",
            highlight=False,
            markup=False,
        )


def _print_table(console: Console, key: str, points: list[Point]) -> None:
    """Print one line per prediction, and below the table why some values have none."""
    console.print(_table(key, points))
    for point in points:
        if point.prediction is None:
            first = point.problem.splitlines()[0].split(". Raise ")[0]
            console.print(f"{key} {point.value}: {first}", highlight=False, markup=False)
    notes = [
        getattr(point.prediction, name, None)
        for name in ("full_disk_note", "accuracy_note")
        for point in points
    ]
    for note in dict.fromkeys(filter(None, notes)):
        console.print(f"{note}.", highlight=False, markup=False)


def _table(key: str, points: list[Point]) -> Table:
    from rich import box
    from rich.table import Table

    from penstock.prediction import row
    from penstock.progress import show_bytes, show_count, show_dollars, show_duration

    found = [point.prediction for point in points if point.prediction is not None]
    columns: dict[str, Callable[[Found], str]] = {
        "engines": lambda one: f"{one.config.engines:,}",
        "tokens/s": lambda one: show_count(one.tokens_per_second),
        "step": lambda one: show_duration(one.step_seconds),
        "run": lambda one: show_duration(one.run_seconds),
        "memory of an engine": lambda one: show_bytes(row(one)["engine_bytes"]),
    }
    columns.pop(key, None)  # the first column has it
    if any(one.price.dollars_per_hour is not None for one in found):
        columns["dollars"] = lambda one: (
            "" if (cost := row(one)["cost"]) is None else show_dollars(cost)
        )
    columns["bound by"] = lambda one: row(one)["binding"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(key, no_wrap=True)
    for heading in columns:
        is_last = heading == "bound by"
        justify: Literal["left", "right"] = "left" if is_last else "right"
        table.add_column(heading, justify=justify, no_wrap=not is_last)
    for point in points:
        one = point.prediction
        shown = ["-"] * len(columns) if one is None else [show(one) for show in columns.values()]
        table.add_row(point.value, *shown)
    return table
