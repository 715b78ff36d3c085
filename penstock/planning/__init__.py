"""The resources and the division of a run, decided before its first step."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.planning.builders import build_program
    from penstock.planning.execution_plan import ExecutionPlan, plan_execution
    from penstock.planning.machine_limits import DeviceMemory, Machine
    from penstock.planning.memory_budget import transfer_buffer_bytes
    from penstock.planning.model_facts import ModelFacts, RememberedModel
    from penstock.planning.product_choices import (
        make_inference_engine,
        measure_current,
        with_products,
    )
    from penstock.planning.program_cache import OutlinedModels
    from penstock.planning.program_outline import outline_program
    from penstock.planning.relays import relay_count
    from penstock.planning.sparse_weights import SparsePlan, mask_rule_of
    from penstock.planning.wafer import wafer_options, with_wafer

__all__ = [
    "DeviceMemory",
    "ExecutionPlan",
    "Machine",
    "ModelFacts",
    "OutlinedModels",
    "RememberedModel",
    "SparsePlan",
    "build_program",
    "builders",
    "make_inference_engine",
    "mask_rule_of",
    "measure_current",
    "outline_program",
    "plan_execution",
    "relay_count",
    "selected_weights",
    "store_factory",
    "transfer_buffer_bytes",
    "wafer_options",
    "with_products",
    "with_wafer",
]

__getattr__ = lazily(
    __name__,
    {
        "DeviceMemory": "machine_limits",
        "ExecutionPlan": "execution_plan",
        "Machine": "machine_limits",
        "ModelFacts": "model_facts",
        "OutlinedModels": "program_cache",
        "RememberedModel": "model_facts",
        "SparsePlan": "sparse_weights",
        "build_program": "builders",
        "make_inference_engine": "product_choices",
        "mask_rule_of": "sparse_weights",
        "measure_current": "product_choices",
        "outline_program": "program_outline",
        "plan_execution": "execution_plan",
        "relay_count": "relays",
        "transfer_buffer_bytes": "memory_budget",
        "wafer_options": "wafer",
        "with_products": "product_choices",
        "with_wafer": "wafer",
    },
)
