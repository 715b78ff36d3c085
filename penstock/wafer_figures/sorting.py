"""What sorting is worth: features dealt to rows of cores by their number of entries, or as they
come, for masks that are drawn at random and for masks whose features differ."""

from pathlib import Path

import numpy as np

from penstock.pictures import COLOURS, new_figure, save
from penstock.wafer import CoreParameters, Mesh
from penstock.wafer.closed_form import ActivationLayout, StreamedProduct, count_mask, forward
from penstock.wafer_figures.drawn_masks import drawn_mask

WIDTH, TOKENS, MESH = 2048, 4096, Mesh(64, 64)
_SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
_SPREAD = 0.5  # deviation of the logarithm of a feature's share of entries
_KINDS = {"entries at random": 0.0, "features differ": _SPREAD}


def draw(path: Path, core: CoreParameters) -> None:
    """Draw the cycles of the forward product over those of its entries evenly divided.

    Args:
        path: of the picture.
        core: parameters of the cores.
    """
    figure, axes = new_figure()
    ideal = [1 / (1 - sparsity) for sparsity in _SPARSITIES]
    for (name, spread), colour in zip(_KINDS.items(), COLOURS, strict=False):
        masks = [drawn_mask((WIDTH, WIDTH), sparsity, spread) for sparsity in _SPARSITIES]
        for is_sorted, style in ((True, "o-"), (False, "s--")):
            times = [over_even(mask, core, is_sorted=is_sorted) for mask in masks]
            label = f"{name}, {'sorted' if is_sorted else 'not sorted'}"
            axes.plot(ideal, times, style, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_xticks(ideal, [f"{sparsity:.0%}" for sparsity in _SPARSITIES])
    axes.minorticks_off()
    axes.set_ylim(bottom=1.0)
    axes.set_xlabel("sparsity of the weight (logarithm of 1 / density)")
    axes.set_ylabel("cycles over those of evenly divided entries")
    axes.set_title(
        f"Closed form ({core.name} cores) for drawn masks: forward, {WIDTH:,} x {WIDTH:,}, "
        f"{TOKENS:,} tokens, {MESH} cores",
        fontsize=9,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)


def over_even(
    mask: np.ndarray, core: CoreParameters, *, is_sorted: bool, mesh: Mesh = MESH
) -> float:
    """Return the cycles of the forward product with a mask over those of its entries alone, if each
    row of cores had as many."""
    outputs, inputs = mask.shape
    layout = ActivationLayout(mesh)
    counts = count_mask(mask, layout.feature_rows, is_sorted=is_sorted)
    product = StreamedProduct(outputs, inputs, TOKENS, density=counts.density)
    each = core.trigger_cycles + core.elements_cycles(layout.tokens(TOKENS))
    return forward(product, layout, core, mask=counts).total / (
        counts.entries / layout.feature_rows * each
    )
