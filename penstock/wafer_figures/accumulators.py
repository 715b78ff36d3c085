"""How many unsent sums and received rows a core needs: with one of each, rows of cores wait for
each other at every output feature."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.pictures import COLOURS, new_figure, save
from penstock.wafer import CS2_MESH, CoreParameters
from penstock.wafer.closed_form import (
    HIDDEN,
    ActivationLayout,
    StreamedProduct,
    data_gradient,
    forward,
)

WIDTH = 12288
TOKENS = 131072
SPARSITY = 0.9
_COUNTS = (1, 2, 4, 8, 16, 32, 64)


def draw(path: Path, core: CoreParameters) -> None:
    """Draw the cycles of products over the numbers of sums and rows that a core may hold.

    Args:
        path: of the picture.
        core: parameters of the cores.
    """
    figure, axes = new_figure()
    layout = ActivationLayout(CS2_MESH)
    product = StreamedProduct(WIDTH, WIDTH, TOKENS, density=1 - SPARSITY)
    lines = {
        "forward: unsent sums, inbox of any size": [
            forward(product, layout, core, replace(HIDDEN, accumulators=count)) for count in _COUNTS
        ],
        "forward: unsent sums and an inbox of as many": [
            forward(product, layout, core, replace(HIDDEN, accumulators=count, inbox_rows=count))
            for count in _COUNTS
        ],
        "data gradient: rows of dY": [
            data_gradient(product, layout, core, replace(HIDDEN, broadcast_rows=count))
            for count in _COUNTS
        ],
    }
    for (label, cycles), colour in zip(lines.items(), COLOURS, strict=False):
        totals = [one.total / 1e6 for one in cycles]
        axes.plot(_COUNTS, totals, "o-", color=colour, label=label)
    least = (
        product.entries
        / layout.feature_rows
        * (core.trigger_cycles + core.elements_cycles(layout.tokens(TOKENS)))
    )
    axes.axhline(least / 1e6, color="gray", linewidth=1, label="entries alone, evenly divided")
    axes.set_xscale("log", base=2)
    axes.set_xticks(_COUNTS, [str(count) for count in _COUNTS])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sums or rows that a core may hold")
    axes.set_ylabel("cycles of one product, millions")
    axes.set_title(
        f"Closed form ({core.name} cores): {WIDTH:,} x {WIDTH:,}, {SPARSITY:.0%} sparse, "
        f"{TOKENS:,} tokens",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)
