"""`penstock wafer figure`: pictures of a simulated wafer."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.arguments import Cores, Pictures, core_parameters


def _known() -> str:
    from penstock.wafer_figures import FIGURES

    return ", ".join(FIGURES)


def figure(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {_known()}.")],
    cores: Cores = "sim",
    out: Pictures = None,
) -> None:
    """Draw a picture. It says whether its numbers are simulated, closed form, or published."""
    from penstock.wafer_figures import draw, figure_named

    chosen, core = figure_named(name), core_parameters(cores)
    for path in out or [Path(f"{name}{chosen.endings[0]}")]:
        draw(name, path, core)
        typer.echo(f"{path}: {chosen.about}; {chosen.source}")
