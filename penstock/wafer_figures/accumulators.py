"""How many unsent sums and received rows a core needs: with one of each, rows of cores wait for
each other at every output feature."""

from pathlib import Path

from penstock.pictures import COLOURS, new_figure, save
from penstock.wafer import CoreParameters
from penstock.wafer.closed_form import data_gradient, forward
from penstock.wafer_figures.over_counts import (
    LAYER,
    LAYOUT,
    TOKENS,
    cycles_over,
    finish_axes,
    layer,
)

SPARSITY = 0.9
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_LINES = {
    "forward: unsent sums, inbox of any size": (forward, ("accumulators",)),
    "forward: unsent sums and an inbox of as many": (forward, ("accumulators", "inbox_rows")),
    "data gradient: rows of dY": (data_gradient, ("broadcast_rows",)),
}


def draw(path: Path, core: CoreParameters) -> None:
    """Draw the cycles of products over the numbers of sums and rows that a core may hold.

    Args:
        path: of the picture.
        core: parameters of the cores.
    """
    figure, axes = new_figure()
    for (label, (product, held)), colour in zip(_LINES.items(), COLOURS, strict=False):
        cycles = cycles_over(_COUNTS, product, core, SPARSITY, held)
        axes.plot(_COUNTS, cycles, "o-", color=colour, label=label)
    each = core.trigger_cycles + core.elements_cycles(LAYOUT.tokens(TOKENS))
    least = layer(SPARSITY).entries / LAYOUT.feature_rows * each / 1e6
    axes.axhline(least, color="gray", linewidth=1, label="entries alone, evenly divided")
    axes.set_ylim(bottom=0)
    finish_axes(
        axes,
        _COUNTS,
        {
            "title": f"Closed form ({core.name} cores): {SPARSITY:.0%} sparse, {LAYER}",
            "x": "sums or rows that a core may hold",
            "y": "cycles of one product, millions",
        },
    )
    save(figure, path)
