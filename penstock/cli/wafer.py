"""`penstock wafer`: cycles of products, of a program's stages, and pictures of a wafer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.wafer_figure import figure
from penstock.cli.wafer_layers import layers
from penstock.cli.wafer_simulated import page, simulated_products

if TYPE_CHECKING:
    from penstock.wafer.closed_form import ActivationLayout, ProductCycles, StreamedProduct

_WIDTH = 80

app = typer.Typer(
    help="Cycles on a simulated wafer-scale engine, and pictures of them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Layout(StrEnum):
    """Layouts of activations on the mesh."""

    best = "best"
    plain = "plain"


@app.command("product")
def product(
    outputs: Annotated[int, typer.Option(metavar="M", help="Output features of the weight.")],
    inputs: Annotated[int, typer.Option(metavar="K", help="Input features of the weight.")],
    tokens: Annotated[int, typer.Option(metavar="T", help="Tokens of the activations.")],
    density: Annotated[
        float, typer.Option(metavar="D", help="Share of kept entries; 1: a dense weight.")
    ] = 1.0,
    mesh: Annotated[
        str, typer.Option(metavar="RxC", help="Rows and columns of cores.")
    ] = "750x994",
    cores: Annotated[
        str, typer.Option(metavar="NAME", help="sim, silicon, or a file of core parameters.")
    ] = "sim",
    element_bytes: Annotated[
        int, typer.Option("--bytes", metavar="2|4", help="Bytes of a number.")
    ] = 2,
    layout: Annotated[
        Layout,
        typer.Option(help="best: the one with the fewest cycles; plain: tokens over columns."),
    ] = Layout.best,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Simulate the products too, in the plain layout; for small layers and meshes.",
        ),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the cycles of the three products of a layer, by term, and what binds each."""
    from penstock.wafer import Mesh, load_parameters
    from penstock.wafer.closed_form import (
        ActivationLayout,
        StreamedProduct,
        check_fits,
        choose_layout,
        step_cycles,
    )

    cells, core = Mesh.parse(mesh), load_parameters(cores)
    streamed = StreamedProduct(
        outputs, inputs, tokens, density, is_indexed=density < 1, element_bytes=element_bytes
    )
    if layout is Layout.best and not simulate:
        chosen = choose_layout(streamed, cells, core).layout
    else:
        chosen = ActivationLayout(cells)
        check_fits(streamed, chosen, core)
    parts = step_cycles(streamed, chosen, core)
    simulated = simulated_products(streamed, cells, core) if simulate else []
    if json_output:
        typer.echo(
            json.dumps(
                {
                    "outputs": outputs,
                    "inputs": inputs,
                    "tokens": tokens,
                    "density": density,
                    "mesh": str(cells),
                    "cores": core.name,
                    "layout": str(chosen),
                    "source": "closed form",
                    "products": [part.as_dict() for part in parts],
                    "simulated": simulated,
                },
                indent=2,
            )
        )
        return
    for line in _page(streamed, chosen, core.name, core.clock_hz, parts):
        typer.echo(line)
    for line in page(simulated) if simulated else ():
        typer.echo(line)


def _page(
    streamed: StreamedProduct,
    layout: ActivationLayout,
    cores: str,
    clock_hz: float,
    parts: Sequence[ProductCycles],
) -> list[str]:
    """Return the lines of a table with a column for each product."""
    rows: list[tuple[str, list[str]]] = [
        ("cycles", [f"{part.total:,.0f}" for part in parts]),
        ("milliseconds", [f"{1e3 * part.total / clock_hz:,.4g}" for part in parts]),
        ("binds", [part.binding for part in parts]),
        ("longest term", [part.largest_part for part in parts]),
        ("of the lanes", [f"{part.utilization:.1%}" for part in parts]),
    ]
    for title, name in (
        ("arithmetic", "arithmetic"),
        ("vector set-up", "set_up"),
        ("partial sums", "partial_sums"),
        ("skew", "skew"),
        ("fill", "fill"),
    ):
        rows.append((title, [_cycles(getattr(part, name)) for part in parts]))
    limits = dict.fromkeys(name for part in parts for name in part.limits)
    rows += [(name, [_cycles(part.limits.get(name, 0.0)) for part in parts]) for name in limits]
    first = max(len(title) for title, _ in rows) + 2
    each = (_WIDTH - first) // len(parts)
    lines = [
        f"{streamed}, {streamed.element_bytes} bytes each",
        f"{layout.mesh} cores ({cores}); closed form",
        f"layout: {layout}",
        "",
        " " * first + "".join(part.name.rjust(each) for part in parts),
    ]
    for title, cells in rows:
        if title == "arithmetic":
            lines.append("terms of the cores, which add up; fill is added to the slowest")
        elif title in limits and title == next(iter(limits)):
            lines.append("links, which work beside the cores")
        lines.append(title.ljust(first) + "".join(_fitted(cell, each) for cell in cells))
    return lines


def _cycles(value: float) -> str:
    return f"{value:,.0f}" if value else "-"


def _fitted(text: str, width: int) -> str:
    """Return a text at the right of a column, shortened if it is wider."""
    return (text if len(text) < width else f"{text[: width - 3]}..").rjust(width)


app.command("layers")(layers)
app.command("figure")(figure)
