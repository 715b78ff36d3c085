"""Partial sums along a chain or a ring: a ring divides outputs evenly, and needs whole turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.pictures import COLOURS, new_figure, save
from penstock.wafer import CS2_MESH, CoreParameters
from penstock.wafer.closed_form import HIDDEN, ActivationLayout, StreamedProduct, forward

WIDTH = 12288
TOKENS = 131072
_SPARSITIES = (0.8, 0.9, 0.95)
_ACCUMULATORS = (4, 8, 16, 32, 64, 128, 256, 512)


def draw(path: Path, core: CoreParameters) -> None:
    """Draw the cycles of the forward product over the number of sums that a core holds.

    Args:
        path: of the picture.
        core: parameters of the cores.
    """
    figure, axes = new_figure()
    layout = ActivationLayout(CS2_MESH)
    for sparsity, colour in zip(_SPARSITIES, COLOURS, strict=False):
        product = StreamedProduct(WIDTH, WIDTH, TOKENS, density=1 - sparsity)
        chain = [
            forward(product, layout, core, replace(HIDDEN, accumulators=count)).total
            for count in _ACCUMULATORS
        ]
        ring = [
            forward(
                product, layout, core, replace(HIDDEN, accumulators=count, reduction="ring")
            ).total
            for count in _ACCUMULATORS
        ]
        axes.plot(_ACCUMULATORS, ring, "o-", color=colour, label=f"ring, {sparsity:.0%} sparse")
        axes.plot(_ACCUMULATORS, chain, "--", color=colour, label=f"chain, {sparsity:.0%} sparse")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(_ACCUMULATORS, [str(count) for count in _ACCUMULATORS])
    axes.minorticks_off()
    axes.set_xlabel("partial sums that a core may hold unsent")
    axes.set_ylabel("cycles of the forward product")
    axes.set_title(
        f"Closed form ({core.name} cores): {WIDTH:,} x {WIDTH:,}, {TOKENS:,} tokens, "
        f"{CS2_MESH} cores",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)
