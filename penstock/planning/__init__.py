"""The resources and the division of a run, decided before its first step."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.planning.builders import build_program
    from penstock.planning.execution_plan import ExecutionPlan, plan_execution
    from penstock.planning.machine import Machine
    from penstock.planning.memory_budget import bytes_on_the_way

__all__ = [
    "ExecutionPlan",
    "Machine",
    "build_program",
    "builders",
    "bytes_on_the_way",
    "plan_execution",
    "store_factory",
]

__getattr__ = lazily(
    __name__,
    {
        "ExecutionPlan": "execution_plan",
        "Machine": "machine",
        "build_program": "builders",
        "bytes_on_the_way": "memory_budget",
        "plan_execution": "execution_plan",
    },
)
