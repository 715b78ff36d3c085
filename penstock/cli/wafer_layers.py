"""`penstock wafer layers`: the cycles of each kind of stage of a program, in closed form."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.arguments import (
    ConfigArgument,
    JsonOutput,
    MicroBatch,
    Overrides,
    SequenceLength,
    WeightPrecision,
    build,
    configuration,
    core_parameters,
    mesh_of,
)
from penstock.cli.cycle_table import HEADINGS, NAME_WIDTH, cycle_columns, name_column
from penstock.progress import show_cycle_time

if TYPE_CHECKING:
    from penstock.engine import WaferPlan
    from penstock.program import Kind, Program


def layers(
    config: ConfigArgument,
    overrides: Overrides = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="RxC", help="Rows and columns of cores; default engine.mesh."),
    ] = None,
    cores: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Costs of a core: sim, silicon, or a file (.yaml); default engine.cores.",
        ),
    ] = None,
    micro_batch: MicroBatch = None,
    sequence_length: SequenceLength = None,
    precision: WeightPrecision = None,
    json_output: JsonOutput = False,
) -> None:
    """Print the cycles of each kind of stage of CONFIG, for one micro-batch.

    No weights are created, so this works for a model of any size.
    """
    settings = configuration(config, overrides)

    from penstock.engine import plan_wafer
    from penstock.wafer import WaferOptions

    options = WaferOptions.of(settings.engine)
    if mesh is not None:
        options = replace(options, mesh=mesh_of(mesh))
    if cores is not None:
        options = replace(options, core=core_parameters(cores))
    program = build(settings, micro_batch, sequence_length, precision)
    plan = plan_wafer(program, options)
    rows = _rows(program, plan)
    if json_output:
        about = {"mesh": str(options.mesh), "cores": options.core.name, "source": "closed form"}
        typer.echo(json.dumps({**about, "kinds": rows}, indent=2))
        return
    for line in _page(program, plan, rows):
        typer.echo(line)


def _rows(program: Program, plan: WaferPlan) -> list[dict[str, Any]]:
    """Return the cycles of each kind of stage as plain values, in the program's order."""
    kinds: dict[str, tuple[Kind, str, int]] = {}
    for stage in program.stages:
        kind, name, count = kinds.get(stage.kind.digest, (stage.kind, stage.name, 0))
        kinds[stage.kind.digest] = kind, name, count + 1
    last = program.stages[-1].kind.digest
    return [
        _row(kind, name, count, plan, is_last=digest == last)
        for digest, (kind, name, count) in kinds.items()
    ]


def _row(kind: Kind, name: str, count: int, plan: WaferPlan, *, is_last: bool) -> dict[str, Any]:
    from penstock.engine import stage_cycles_of

    place = plan.kinds[kind.digest]
    sweeps = ("turn",) if is_last else ("forward", "backward")
    found = {sweep: stage_cycles_of(kind, sweep, plan) for sweep in sweeps}
    by_work: dict[str, float] = {}
    for one in found.values():
        for work, cycles in one.by_work.items():
            by_work[work] = by_work.get(work, 0.0) + cycles
    return {
        "first": name,
        "stages": count,
        "tokens": place.tokens,
        "layout": str(place.layout),
        "cycles": {sweep: one.cycles for sweep, one in found.items()},
        "by_work": dict(sorted(by_work.items(), key=lambda item: -item[1])),
    }


def _page(program: Program, plan: WaferPlan, rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table, of at most 80 columns."""
    options = plan.options
    lines = [
        f"{program.name}: one micro-batch of {max(row['tokens'] for row in rows):,} tokens",
        f"{options.mesh} cores ({options.core.name}), {options.core.clock_hz / 1e9:g} GHz; closed "
        "form",
        "",
        "cycles of one stage, and the kind of work that takes most of them",
        f"{'first stage':<{NAME_WIDTH}}{'stages':>7}{HEADINGS}  most",
    ]
    total = 0.0
    for row in rows:
        cycles, work = row["cycles"], next(iter(row["by_work"].items()), ("", 0.0))
        each = sum(cycles.values())
        total += row["stages"] * each
        share = f"{work[0]} {work[1] / each:.0%}" if each else "-"
        columns = f"{row['stages']:>7}{cycle_columns(cycles)}  {share}"
        lines.append(name_column(row["first"]) + columns)
    stages = sum(row["stages"] for row in rows)
    time = show_cycle_time(total, options.core.clock_hz)
    lines += [
        "",
        f"all {stages} stages: {total:,.0f} cycles, {time}",
        "",
        "layout of activations",
        *(name_column(row["first"]) + row["layout"] for row in rows),
    ]
    return lines
