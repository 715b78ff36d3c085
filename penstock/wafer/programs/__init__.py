"""Programs for the simulated mesh, in its language: products, collectives, solvers."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.wafer.programs.sparse_forward import simulate_forward
    from penstock.wafer.programs.sparse_gradients import (
        simulate_data_gradient,
        simulate_weight_gradient,
    )
    from penstock.wafer.programs.streamed import Run, SimulatedProduct, Spread, closed_form_of

__all__ = [
    "Run",
    "SimulatedProduct",
    "Spread",
    "closed_form_of",
    "simulate_data_gradient",
    "simulate_forward",
    "simulate_weight_gradient",
]

__getattr__ = lazily(
    __name__,
    {
        "simulate_forward": "sparse_forward",
        "simulate_data_gradient": "sparse_gradients",
        "simulate_weight_gradient": "sparse_gradients",
        "Run": "streamed",
        "SimulatedProduct": "streamed",
        "Spread": "streamed",
        "closed_form_of": "streamed",
    },
)
