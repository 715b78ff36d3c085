"""`penstock plan`: whether a run fits, how long it takes, what binds it, and what would help."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from penstock.cli.program import configuration


def plan(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="Preset, run configuration (.yaml), or Hugging Face config.json."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys to set, such as batch.size=64."),
    ] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            "--machine",
            metavar="NAME",
            help="Known machine or machine file; may be repeated. Default: this host, as measured "
            "by `penstock calibrate`.",
        ),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per machine.")
    ] = False,
) -> None:
    """Predict the run of CONFIG: memory, time of a step and of the run, traffic, cost.

    The decisions and refusals are those of `penstock train`. Nothing is trained and no weights are
    created.
    """
    settings = configuration(config, overrides or [])

    from rich.console import Console

    from penstock.calibration import this_host
    from penstock.machines import load_machine
    from penstock.prediction import advise, as_json, page, plan_run

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)

    def notice(text: str) -> None:
        typer.echo(f"note: {text}", err=True)

    names: list[str | None] = [*machine] if machine else [None]
    for name in names:
        described = this_host(notice) if name is None else load_machine(name)
        found = plan_run(settings, described, notice, is_here=name is None)
        advice = advise(found)
        if json_output:
            typer.echo(json.dumps(as_json(found, advice)))
        else:
            console.print(page(found, advice))
