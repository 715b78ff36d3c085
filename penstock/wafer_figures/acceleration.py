"""Acceleration over sparsity: layers of several widths, on one engine and on sixteen."""

from pathlib import Path

from penstock.pictures import COLOURS, new_figure, save
from penstock.wafer import CS2_MESH, CoreParameters
from penstock.wafer.closed_form import acceleration_curve

WIDTHS = (2048, 5120, 12288)
TOKENS = 131072
_SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99)
_TICKS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
_LEVELS = (1, 2, 5, 10, 20, 50, 100)
_PUBLISHED = (0.9, 58 / 7.5)  # PFLOP/s at 90 % over dense ones, CS-2


def draw(path: Path, core: CoreParameters) -> None:
    """Draw the acceleration of square layers in training, with the best layout for each sparsity.

    Args:
        path: of the picture.
        core: parameters of the cores.
    """
    figure, axes = new_figure()
    ideal = [1 / (1 - sparsity) for sparsity in _SPARSITIES]
    axes.plot(ideal, ideal, color="gray", linewidth=1, label="ideal: only kept entries take time")
    for width, colour in zip(WIDTHS, COLOURS, strict=False):
        for engines, style in ((1, "o-"), (16, "s--")):
            curve = acceleration_curve(
                width,
                width,
                TOKENS,
                CS2_MESH,
                core,
                sparsities=_SPARSITIES,
                layout="best",
                engines=engines,
            )
            label = f"{width:,} wide, {engines} engine{'s' if engines > 1 else ''}"
            speeds = [point.acceleration for point in curve]
            axes.plot(ideal, speeds, style, color=colour, markersize=4, label=label)
    sparsity, speed = _PUBLISHED
    axes.plot(
        [1 / (1 - sparsity)],
        [speed],
        "*",
        color="black",
        markersize=11,
        label="published: 58 over 7.5 PFLOP/s",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([1 / (1 - tick) for tick in _TICKS], [f"{tick:.0%}" for tick in _TICKS])
    axes.set_yticks(_LEVELS, [f"{level}x" for level in _LEVELS])
    axes.minorticks_off()
    axes.set_xlabel("sparsity of the weight (logarithm of 1 / density)")
    axes.set_ylabel("acceleration over the dense layer")
    axes.set_title(
        f"Closed form ({core.name} cores): three products of a step, {TOKENS:,} tokens, "
        f"{CS2_MESH} cores",
        fontsize=10,
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)
