"""The resources and the division of a run, decided before its first step."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.planning.builders import build_program
    from penstock.planning.execution_plan import ExecutionPlan, plan_execution
    from penstock.planning.machine import Machine
    from penstock.planning.memory_budget import transfer_buffer_bytes
    from penstock.planning.sparse_weights import SparsePlan, first_change

__all__ = [
    "ExecutionPlan",
    "Machine",
    "SparsePlan",
    "build_program",
    "builders",
    "first_change",
    "plan_execution",
    "store_factory",
    "transfer_buffer_bytes",
]

__getattr__ = lazily(
    __name__,
    {
        "ExecutionPlan": "execution_plan",
        "Machine": "machine",
        "SparsePlan": "sparse_weights",
        "build_program": "builders",
        "first_change": "sparse_weights",
        "plan_execution": "execution_plan",
        "transfer_buffer_bytes": "memory_budget",
    },
)
