"""Programs for the simulated mesh, in its language: products, collectives, solvers."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.wafer.programs.all_reduce import (
        simulate_ring_all_reduce as simulate_ring_all_reduce,
        simulate_tree_all_reduce as simulate_tree_all_reduce,
    )
    from penstock.wafer.programs.dense import (
        simulate_dense_product as simulate_dense_product,
        simulate_matrix_vector as simulate_matrix_vector,
    )
    from penstock.wafer.programs.single_core import (
        LOOP_FORMS as LOOP_FORMS,
        simulate_loop_form as simulate_loop_form,
        simulate_relay as simulate_relay,
    )
    from penstock.wafer.programs.solvers import simulate_solver as simulate_solver
    from penstock.wafer.programs.sparse_forward import simulate_forward as simulate_forward
    from penstock.wafer.programs.sparse_gradients import (
        simulate_data_gradient as simulate_data_gradient,
        simulate_weight_gradient as simulate_weight_gradient,
    )
    from penstock.wafer.programs.stencil import simulate_stencil as simulate_stencil
    from penstock.wafer.programs.streamed import (
        Run as Run,
        SimulatedProduct as SimulatedProduct,
        Spread as Spread,
        closed_form_of as closed_form_of,
    )
    from penstock.wafer.programs.vectors import (
        simulate_axpy as simulate_axpy,
        simulate_dot as simulate_dot,
    )

__getattr__ = lazily(__name__, __file__)
