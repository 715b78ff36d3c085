"""Partial sums along a chain or a ring: a ring divides outputs evenly, and needs whole turns."""

from pathlib import Path

from penstock.pictures import COLOURS, new_figure, save
from penstock.wafer import CoreParameters
from penstock.wafer.closed_form import forward
from penstock.wafer_figures.over_counts import LAYER, cycles_over, finish_axes

_SPARSITIES = (0.8, 0.9, 0.95)
_COUNTS = (4, 8, 16, 32, 64, 128, 256, 512)
_LEVELS = (1, 2, 5, 10)  # million cycles
_FORMS = {"ring": "o-", "chain": "--"}


def draw(path: Path, core: CoreParameters) -> None:
    """Draw the cycles of the forward product over the number of sums that a core holds.

    Args:
        path: of the picture.
        core: parameters of the cores.
    """
    figure, axes = new_figure()
    for sparsity, colour in zip(_SPARSITIES, COLOURS, strict=False):
        for form, style in _FORMS.items():
            cycles = cycles_over(
                _COUNTS, forward, core, sparsity, ("accumulators",), reduction=form
            )
            label = f"{form}, {sparsity:.0%} sparse"
            axes.plot(_COUNTS, cycles, style, color=colour, label=label)
    axes.set_yscale("log")
    axes.set_yticks(_LEVELS, [str(level) for level in _LEVELS])
    finish_axes(
        axes,
        _COUNTS,
        {
            "title": f"Closed form ({core.name} cores): {LAYER}",
            "x": "partial sums that a core may hold unsent",
            "y": "cycles of the forward product, millions",
        },
    )
    save(figure, path)
