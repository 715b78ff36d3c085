"""Acceleration by sparsity: how much faster a layer's products are than dense, and why not more.

With a share d of the entries kept, arithmetic falls to d. Other terms do not, or fall more slowly:
passing on the partial sums of every output feature, their words on the links of a column, the skew
between rows of cores, and crossing the mesh. A layout with fewer feature rows relieves the links,
but leaves each core fewer tokens per entry, so that the set-up of vector operations weighs more.
The first term that exceeds the arithmetic is where the acceleration saturates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from penstock.errors import ConfigError
from penstock.wafer.closed_form.cycles import ProductCycles
from penstock.wafer.closed_form.layout import ActivationLayout
from penstock.wafer.closed_form.layout_choice import choose_layout
from penstock.wafer.closed_form.sparse_products import (
    PRODUCTS,
    data_gradient,
    forward,
    weight_gradient,
)
from penstock.wafer.closed_form.streamed_product import HIDDEN, StreamedProduct, StreamingOptions
from penstock.wafer.parameters import CoreParameters, Mesh

SPARSITIES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
_FORMS = {"forward": forward, "data gradient": data_gradient, "weight gradient": weight_gradient}

LayoutRule = Literal["dense", "plain", "best"]


@dataclass(frozen=True)
class AccelerationPoint:
    """A layer at one sparsity.

    Attributes:
        sparsity: share of entries that are not kept.
        products: cycles of each product.
        dense: cycles of the products of the dense layer.
        layout: of the activations.
    """

    sparsity: float
    products: tuple[ProductCycles, ...]
    dense: tuple[ProductCycles, ...]
    layout: ActivationLayout

    @property
    def cycles(self) -> float:
        """Of all products."""
        return sum(part.total for part in self.products)

    @property
    def dense_cycles(self) -> float:
        """Of all products of the dense layer."""
        return sum(part.total for part in self.dense)

    @property
    def acceleration(self) -> float:
        """Times as fast as the dense layer."""
        return self.dense_cycles / self.cycles

    @property
    def ideal(self) -> float:
        """The acceleration if only kept entries took time."""
        return 1 / (1 - self.sparsity)

    @property
    def binding(self) -> str:
        """The term that takes longest in the slowest product."""
        return max(self.products, key=lambda part: part.total).largest_part


def acceleration_curve(
    outputs: int,
    inputs: int,
    tokens: int,
    mesh: Mesh,
    core: CoreParameters,
    *,
    sparsities: Sequence[float] = SPARSITIES,
    products: Sequence[str] = PRODUCTS,
    options: StreamingOptions = HIDDEN,
    layout: LayoutRule = "dense",
    engines: int = 1,
) -> tuple[AccelerationPoint, ...]:
    """Return the acceleration of a layer at each sparsity.

    The dense layer has the layout that is best for it, streams without indices, and is compared
    with the same products.

    Args:
        tokens: of a step, divided over `engines`.
        products: which of `forward`, `data gradient` and `weight gradient` count.
        layout: of the sparse layer. `dense`: that of the dense layer; `plain`: tokens over columns
            and features over rows for both; `best`: the best at each sparsity.

    Raises:
        ConfigError: a sparsity outside 0 to below 1, an unknown product, no engine.
        BudgetError: the dense layer does not fit the cores' memory in any layout.
    """
    wrong = [name for name in products if name not in _FORMS]
    if wrong or not products:
        raise ConfigError(
            f"products: expected some of {', '.join(_FORMS)}, got {', '.join(wrong) or 'none'}"
        )
    for sparsity in sparsities:
        if not 0 <= sparsity < 1:
            raise ConfigError(
                f"sparsity: expected a number from 0 to below 1, got {sparsity:g}; write 0.9 for "
                "90 %"
            )
    if engines < 1:
        raise ConfigError(f"engines: expected a number from 1 up, got {engines}")
    each = -(-tokens // engines)
    whole = StreamedProduct(outputs, inputs, each, is_indexed=False)
    is_training = tuple(products) != ("forward",)
    base = (
        ActivationLayout(mesh)
        if layout == "plain"
        else choose_layout(whole, mesh, core, options, is_training=is_training).layout
    )
    dense = tuple(_FORMS[name](whole, base, core, options) for name in products)
    found = []
    for sparsity in sparsities:
        product = replace(whole, density=1 - sparsity, is_indexed=sparsity > 0)
        chosen = base
        if layout == "best":
            chosen = choose_layout(product, mesh, core, options, is_training=is_training).layout
        parts = tuple(_FORMS[name](product, chosen, core, options) for name in products)
        found.append(AccelerationPoint(sparsity, parts, dense, chosen))
    return tuple(found)


def saturation(curve: Sequence[AccelerationPoint], share: float = 0.5) -> AccelerationPoint | None:
    """Return the first point whose acceleration is below a share of the ideal one; None if none."""
    return next((point for point in curve if point.acceleration < share * point.ideal), None)
