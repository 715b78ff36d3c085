"""`penstock wafer layers`: the cycles of each kind of stage of a program, in closed form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.program import Precision, configuration

if TYPE_CHECKING:
    from penstock.engine import WaferPlan
    from penstock.program import Kind, Program


def layers(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="Preset, run configuration (.yaml), or Hugging Face config.json."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set, such as model.n_layer=6."),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="RxC", help="Rows and columns of cores.")
    ] = None,
    cores: Annotated[
        str | None, typer.Option(metavar="NAME", help="sim, silicon, or a file of parameters.")
    ] = None,
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences of one micro-batch.")] = 1,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence; default the model's context.")
    ] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="Type of streamed weights; default fp32.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the cycles of each kind of stage of CONFIG, for one micro-batch.

    No weights are created, so this works for a model of any size.
    """
    settings = configuration(config, overrides or [])
    keys = {"mesh": mesh, "cores": cores}
    given = {key: value for key, value in keys.items() if value is not None}

    from penstock.config import EngineConfig
    from penstock.engine import plan_wafer
    from penstock.planning import build_program
    from penstock.wafer import WaferOptions

    engine = EngineConfig.model_construct(**{**vars(settings.engine), **given})
    options = WaferOptions.of(engine)
    program = build_program(
        settings,
        micro_batch=micro_batch,
        sequence_length=sequence_length or settings.data.sequence_length,
        precision=precision.value if precision else settings.precision,
    )
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
        f"{'first stage':<24}{'stages':>7}{'forward':>14}{'backward':>14}  most of it",
    ]
    total = 0.0
    for row in rows:
        cycles, work = row["cycles"], next(iter(row["by_work"].items()), ("", 0.0))
        each = sum(cycles.values())
        total += row["stages"] * each
        if "turn" in cycles:
            shown = f"{cycles['turn']:>14,.0f}{'':>14}"
        else:
            shown = f"{cycles['forward']:>14,.0f}{cycles['backward']:>14,.0f}"
        share = f"{work[0]} {work[1] / each:.0%}" if each else "-"
        lines.append(f"{_short(row['first'], 23):<24}{row['stages']:>7}{shown}  {share}")
    seconds = total / options.core.clock_hz
    lines += ["", f"in all {total:,.0f} cycles, {1e3 * seconds:.3g} ms", ""]
    lines += [f"{_short(row['first'], 23):<24}{row['layout']}" for row in rows]
    if any("turn" in row["cycles"] for row in rows):
        lines += ["", "The last stage runs forward and backward at once: one number for both."]
    return lines


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else f"..{name[-(width - 2) :]}"
