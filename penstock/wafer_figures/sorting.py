"""What sorting is worth: features dealt to rows of cores by their number of entries, or as they
come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.pictures import COLOURS, new_figure, save
from penstock.wafer import CS2_MESH, CoreParameters
from penstock.wafer.closed_form import HIDDEN, ActivationLayout, StreamedProduct, step_cycles

WIDTHS = (2048, 5120, 12288)
TOKENS = 131072
_SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99)
_TICKS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)


def draw(path: Path, core: CoreParameters) -> None:
    """Draw the cycles of a step's products without sorting over those with it, by sparsity.

    Args:
        path: of the picture.
        core: parameters of the cores.
    """
    figure, axes = new_figure()
    layout, unsorted = ActivationLayout(CS2_MESH), replace(HIDDEN, is_sorted=False)
    ideal = [1 / (1 - sparsity) for sparsity in _SPARSITIES]
    for width, colour in zip(WIDTHS, COLOURS, strict=False):
        ratios = []
        for sparsity in _SPARSITIES:
            product = StreamedProduct(width, width, TOKENS, density=1 - sparsity)
            before = sum(part.total for part in step_cycles(product, layout, core, unsorted))
            after = sum(part.total for part in step_cycles(product, layout, core))
            ratios.append(100 * (before / after - 1))
        axes.plot(ideal, ratios, "o-", color=colour, label=f"{width:,} x {width:,}")
    axes.set_xscale("log")
    axes.set_xticks([1 / (1 - tick) for tick in _TICKS], [f"{tick:.0%}" for tick in _TICKS])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sparsity of the weight")
    axes.set_ylabel("more cycles without sorting, %")
    axes.set_title(
        f"Closed form ({core.name} cores): three products on {CS2_MESH} cores, {TOKENS:,} tokens",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(title="weight")
    save(figure, path)
