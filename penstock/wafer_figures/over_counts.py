"""Lines over the number of sums or rows that a core holds, for one layer in closed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.wafer import CS2_MESH, CoreParameters
from penstock.wafer.closed_form import (
    HIDDEN,
    ActivationLayout,
    ProductCycles,
    StreamedProduct,
    StreamingOptions,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 12288
TOKENS = 131072
LAYER = f"{WIDTH:,} x {WIDTH:,}, {TOKENS:,} tokens, {CS2_MESH} cores"
LAYOUT = ActivationLayout(CS2_MESH)

Product = Callable[
    [StreamedProduct, ActivationLayout, CoreParameters, StreamingOptions], ProductCycles
]


def layer(sparsity: float) -> StreamedProduct:
    """Return the layer at a sparsity."""
    return StreamedProduct(WIDTH, WIDTH, TOKENS, density=1 - sparsity)


def cycles_over(
    counts: Sequence[int],
    product: Product,
    core: CoreParameters,
    sparsity: float,
    held: Sequence[str],
    **options: Any,
) -> list[float]:
    """Return the cycles of a product, in millions, for each count.

    Args:
        held: the options that have the count.
        options: that differ from those of `HIDDEN`.
    """
    return [
        product(
            layer(sparsity),
            LAYOUT,
            core,
            replace(HIDDEN, **(options | dict.fromkeys(held, count))),
        ).total
        / 1e6
        for count in counts
    ]


def finish_axes(axes: Axes, counts: Sequence[int], texts: Mapping[str, str]) -> None:
    """Number the counts and name the axes.

    Args:
        texts: `title`, `x` and `y`.
    """
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel(texts["x"])
    axes.set_ylabel(texts["y"])
    axes.set_title(texts["title"], fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
