"""`penstock wafer product`: the cycles of a layer's three products, by term."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.arguments import Cores, JsonOutput, core_parameters, mesh_of
from penstock.cli.wafer_simulated import page as simulated_page, simulated_products
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.wafer import CoreParameters
    from penstock.wafer.closed_form import ActivationLayout, ProductCycles, StreamedProduct

_WIDTH = 80
_TERMS = (
    ("arithmetic", "arithmetic"),
    ("vector set-up", "set_up"),
    ("partial sums", "partial_sums"),
    ("skew", "skew"),
)


class Layout(StrEnum):
    """Layouts of activations on the mesh."""

    best = "best"
    plain = "plain"


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
    cores: Cores = "sim",
    element_bytes: Annotated[
        int, typer.Option("--bytes", metavar="2|4", help="Bytes of a number.")
    ] = 2,
    layout: Annotated[
        Layout,
        typer.Option(
            help="Of activations. best: the layout with the fewest cycles; plain: "
            "tokens over columns of cores, features over rows."
        ),
    ] = Layout.best,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Simulate the products too, in the plain layout; for small layers and meshes.",
        ),
    ] = False,
    json_output: JsonOutput = False,
) -> None:
    """Print the cycles of the three products of a layer, by term, and what bounds each.

    The products are those of a training step: forward, the gradient of the inputs (data gradient)
    and the gradient of the weight.
    """
    from penstock.wafer.closed_form import (
        ActivationLayout,
        StreamedProduct,
        check_fits,
        choose_layout,
        step_cycles,
    )

    cells, core = mesh_of(mesh), core_parameters(cores)
    if element_bytes not in (2, 4):
        raise ConfigError(f"--bytes: expected 2 or 4, got {element_bytes}")
    streamed = StreamedProduct(
        outputs, inputs, tokens, density, is_indexed=density < 1, element_bytes=element_bytes
    )
    if streamed.entries < 1:
        raise ConfigError(
            f"--density: expected at least one kept entry of {outputs * inputs:,}, got "
            f"{density:g}, which keeps less than one"
        )
    if layout is Layout.best and not simulate:
        chosen = choose_layout(streamed, cells, core).layout
    else:
        chosen = ActivationLayout(cells)
        check_fits(streamed, chosen, core)
    parts = step_cycles(streamed, chosen, core)
    simulated = simulated_products(streamed, cells, core) if simulate else []
    if json_output:
        about = _about(streamed, chosen, core)
        products = [part.as_dict() for part in parts]
        typer.echo(json.dumps({**about, "products": products, "simulated": simulated}, indent=2))
        return
    for line in _page(streamed, chosen, core, parts):
        typer.echo(line)
    for line in simulated_page(streamed, simulated) if simulated else ():
        typer.echo(line)


def _about(
    streamed: StreamedProduct, layout: ActivationLayout, core: CoreParameters
) -> dict[str, Any]:
    return {
        "outputs": streamed.outputs,
        "inputs": streamed.inputs,
        "tokens": streamed.tokens,
        "density": streamed.density,
        "mesh": str(layout.mesh),
        "cores": core.name,
        "layout": str(layout),
        "source": "closed form",
    }


def _page(
    streamed: StreamedProduct,
    layout: ActivationLayout,
    core: CoreParameters,
    parts: Sequence[ProductCycles],
) -> list[str]:
    """Return the lines of a table with a column for each product."""
    limits = dict.fromkeys(name for part in parts for name in part.limits)
    sections: list[tuple[str, list[tuple[str, list[str]]]]] = [
        (
            "",
            [
                ("cycles", [_cycles(part.total) for part in parts]),
                ("milliseconds", [f"{1e3 * core.seconds(part.total):,.4g}" for part in parts]),
                ("bound by", [part.largest_part for part in parts]),
                ("share of peak arithmetic", [f"{part.utilization:.1%}" for part in parts]),
            ],
        ),
        (
            "cycles of the cores, which add up",
            [(title, [_cycles(getattr(part, name)) for part in parts]) for title, name in _TERMS],
        ),
        (
            "cycles of the links, beside the cores: the slowest decides",
            [(name, [_cycles(part.limits.get(name, 0.0)) for part in parts]) for name in limits],
        ),
        (
            "in addition",
            [
                ("waiting", [_cycles(part.waiting) for part in parts]),
                ("beginning and end", [_cycles(part.fill) for part in parts]),
            ],
        ),
    ]
    first = max(len(title) for _, rows in sections for title, _ in rows) + 1
    each = (_WIDTH - first) // len(parts)
    lines = [
        f"{streamed}, {streamed.element_bytes} bytes each",
        f"{layout.mesh} cores ({core.name}), {core.clock_hz / 1e9:g} GHz; closed form",
        f"layout: {layout}",
        "",
        " " * first + "".join(part.name.rjust(each) for part in parts),
    ]
    for heading, rows in sections:
        lines += [heading] if heading else []
        for title, cells in rows:
            lines.append(title.ljust(first) + "".join(_fitted(cell, each) for cell in cells))
    return lines


def _cycles(value: float) -> str:
    if not value:
        return "-"
    return f"{value:,.0f}" if value < 1e12 else f"{value:.4g}"


def _fitted(text: str, width: int) -> str:
    """Return a text at the right of a column, shortened if it is wider."""
    return (text if len(text) < width else f"{text[: width - 3]}..").rjust(width)
