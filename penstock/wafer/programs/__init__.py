"""Programs for the simulated mesh, in its language: products, collectives, solvers."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.wafer.programs.all_reduce import (
        simulate_ring_all_reduce,
        simulate_tree_all_reduce,
    )
    from penstock.wafer.programs.dense import (
        simulate_dense_product,
        simulate_matrix_vector,
    )
    from penstock.wafer.programs.single_core import (
        LOOP_FORMS,
        simulate_loop_form,
        simulate_relay,
    )
    from penstock.wafer.programs.solvers import (
        simulate_solver,
    )
    from penstock.wafer.programs.sparse_forward import (
        simulate_forward,
    )
    from penstock.wafer.programs.sparse_gradients import (
        simulate_data_gradient,
        simulate_weight_gradient,
    )
    from penstock.wafer.programs.stencil import (
        Stencil,
        simulate_stencil,
    )
    from penstock.wafer.programs.streamed import (
        Run,
        SimulatedProduct,
        Spread,
        closed_form_of,
    )
    from penstock.wafer.programs.tree import (
        TreeReduce,
        by_role,
    )
    from penstock.wafer.programs.vectors import (
        simulate_axpy,
        simulate_dot,
    )

__all__ = [
    "LOOP_FORMS",
    "Run",
    "SimulatedProduct",
    "Spread",
    "Stencil",
    "TreeReduce",
    "by_role",
    "closed_form_of",
    "simulate_axpy",
    "simulate_data_gradient",
    "simulate_dense_product",
    "simulate_dot",
    "simulate_forward",
    "simulate_loop_form",
    "simulate_matrix_vector",
    "simulate_relay",
    "simulate_ring_all_reduce",
    "simulate_solver",
    "simulate_stencil",
    "simulate_tree_all_reduce",
    "simulate_weight_gradient",
]

__getattr__ = lazily(
    __name__,
    {
        "simulate_ring_all_reduce": "all_reduce",
        "simulate_tree_all_reduce": "all_reduce",
        "simulate_dense_product": "dense",
        "simulate_matrix_vector": "dense",
        "LOOP_FORMS": "single_core",
        "simulate_loop_form": "single_core",
        "simulate_relay": "single_core",
        "simulate_solver": "solvers",
        "simulate_forward": "sparse_forward",
        "simulate_data_gradient": "sparse_gradients",
        "simulate_weight_gradient": "sparse_gradients",
        "Stencil": "stencil",
        "simulate_stencil": "stencil",
        "Run": "streamed",
        "SimulatedProduct": "streamed",
        "Spread": "streamed",
        "closed_form_of": "streamed",
        "TreeReduce": "tree",
        "by_role": "tree",
        "simulate_axpy": "vectors",
        "simulate_dot": "vectors",
    },
)
