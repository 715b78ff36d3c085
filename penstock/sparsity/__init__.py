"""Products of sparse weights: their layout for the kernels, the products, the choice among them."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.sparsity.choice import Choice, Expanded, Walked
    from penstock.sparsity.layout import SparseLayout
    from penstock.sparsity.measurement import choose_product
    from penstock.sparsity.panels import Panels, from_panels, to_panels
    from penstock.sparsity.products import forward, input_gradient, weight_gradient

__all__ = [
    "Choice",
    "Expanded",
    "Panels",
    "SparseLayout",
    "Walked",
    "choose_product",
    "forward",
    "from_panels",
    "input_gradient",
    "to_panels",
    "weight_gradient",
]

__getattr__ = lazily(
    __name__,
    {
        "Choice": "choice",
        "Expanded": "choice",
        "Panels": "panels",
        "SparseLayout": "layout",
        "Walked": "choice",
        "choose_product": "measurement",
        "forward": "products",
        "from_panels": "panels",
        "input_gradient": "products",
        "to_panels": "panels",
        "weight_gradient": "products",
    },
)
