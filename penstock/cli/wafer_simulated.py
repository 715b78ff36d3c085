"""The products of `penstock wafer product --simulate`: on the simulated mesh, beside the closed
form for the same mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.wafer import CoreParameters, Mesh
    from penstock.wafer.closed_form import StreamedProduct

_MOST_ENTRIES = 100_000_000  # that arrive at a core, of one product: about a minute
_SEED = 0


def simulated_products(
    streamed: StreamedProduct, mesh: Mesh, core: CoreParameters
) -> list[dict[str, Any]]:
    """Return the cycles of the three products of a layer with a mask and numbers drawn at random.

    Raises:
        ConfigError: the product is too large to be simulated.
        BudgetError: a core has too little memory.
    """
    arriving = streamed.entries * mesh.columns
    if arriving > _MOST_ENTRIES:
        raise ConfigError(
            f"--simulate: expected at most {_MOST_ENTRIES:,} entries that arrive at cores, got "
            f"{arriving:,.0f} ({streamed.entries:,.0f} entries in {mesh.columns} columns of "
            "cores); give a smaller layer or mesh, or leave --simulate out"
        )

    import numpy as np

    from penstock.wafer.closed_form import HIDDEN, ActivationLayout as Layout, step_cycles
    from penstock.wafer.programs import (
        Run,
        Spread,
        closed_form_of,
        simulate_data_gradient,
        simulate_forward,
        simulate_weight_gradient,
    )

    random = np.random.default_rng(_SEED)
    shape = (streamed.outputs, streamed.inputs)
    mask = random.random(shape) < streamed.density
    weight = (random.standard_normal(shape) * mask).astype(np.float32)
    x = random.standard_normal((streamed.tokens, streamed.inputs)).astype(np.float32)
    dy = random.standard_normal((streamed.tokens, streamed.outputs)).astype(np.float32)
    run = Run(mesh, core, HIDDEN, element_bytes=streamed.element_bytes)
    spread, is_indexed = Spread(mask, streamed.tokens, run), _streams_indices(streamed)
    product, counts, options = closed_form_of(spread, run, is_indexed=is_indexed)
    given = mask if is_indexed else None
    forms = step_cycles(product, Layout(mesh), core, options, counts)
    found = (
        simulate_forward(weight, given, x, run),
        simulate_data_gradient(weight, given, dy, run),
        simulate_weight_gradient(mask, x, dy, run),
    )
    return [
        {
            "name": form.name,
            "simulated cycles": one.cycles,
            "closed form cycles": form.total,
            "busy": one.report.busy_share,
            "starved": float(one.report.starved.mean() / one.cycles),
            "blocked": float(one.report.blocked.mean() / one.cycles),
            "greatest queue": one.report.greatest_depth,
        }
        for form, one in zip(forms, found, strict=True)
    ]


def _streams_indices(streamed: StreamedProduct) -> bool:
    """Return whether the simulated program sends indices: a 16-bit value shares its word with one,
    and dense values of 32 bits have none."""
    return streamed.is_indexed or streamed.element_bytes == 2


def page(streamed: StreamedProduct, products: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table."""
    how = "each with its index" if _streams_indices(streamed) else "without indices"
    lines = [
        "",
        f"simulated: entries drawn at random, {how}",
        "closed form: here of the drawn entries, in the table above of the density alone",
        f"{'':<17}{'simulated':>14}{'closed form':>14}{'ratio':>8}{'busy':>8}{'starved':>9}"
        f"{'blocked':>9}",
    ]
    for row in products:
        cycles, form = row["simulated cycles"], row["closed form cycles"]
        lines.append(
            f"{row['name']:<17}{cycles:>14,.0f}{form:>14,.0f}{cycles / form:>8.3f}"
            f"{row['busy']:>8.1%}{row['starved']:>9.1%}{row['blocked']:>9.1%}"
        )
    return lines
