"""Chooses the layout of activations for a product, by its cycles on every candidate layout.

The relative sizes of tokens and features decide: the work of the cores is nearly the same in every
layout, but the words of partial sums per link fall with fewer tokens per core, and the set-up of
vector operations per multiply-add falls with more.
"""

from dataclasses import dataclass

from penstock.errors import BudgetError
from penstock.wafer.closed_form.layout import ActivationLayout, candidate_layouts
from penstock.wafer.closed_form.sparse_products import forward, step_cycles
from penstock.wafer.closed_form.sram import sram_use
from penstock.wafer.closed_form.streamed_product import HIDDEN, StreamedProduct, StreamingOptions
from penstock.wafer.parameters import CoreParameters, Mesh


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, and the cycles of the product there.

    Attributes:
        considered: layouts that fit the cores' memory.
    """

    layout: ActivationLayout
    cycles: float
    considered: int


def choose_layout(
    product: StreamedProduct,
    mesh: Mesh,
    core: CoreParameters,
    options: StreamingOptions = HIDDEN,
    *,
    is_training: bool = True,
) -> LayoutChoice:
    """Return the layout with the fewest cycles; of equal ones, the plainest.

    Args:
        is_training: whether all three products count, or the forward product alone.

    Raises:
        BudgetError: no layout fits the cores' memory.
    """
    found: list[tuple[float, ActivationLayout]] = []
    least = None
    for layout in candidate_layouts(mesh):
        use = sram_use(product, layout, core, options, is_training=is_training)
        least = use.total if least is None else min(least, use.total)
        if use.fits:
            found.append((_cycles(product, layout, core, options, is_training), layout))
    if not found:
        raise BudgetError(
            f"{product} on {mesh} cores needs {least:,} bytes per core in the layout that takes "
            f"least, a core has {core.sram_bytes:,}; lower the tokens or take a larger mesh"
        )
    cycles, layout = min(found, key=lambda pair: pair[0])
    return LayoutChoice(layout, cycles, len(found))


def _cycles(
    product: StreamedProduct,
    layout: ActivationLayout,
    core: CoreParameters,
    options: StreamingOptions,
    is_training: bool,
) -> float:
    if is_training:
        return sum(part.total for part in step_cycles(product, layout, core, options))
    return forward(product, layout, core, options).total
