"""The engine: computes one stage at a time and holds activations; stateless between steps."""

from penstock.engine.device_threads import DeviceThread, Member, Rounds
from penstock.engine.expanded_weights import mask_staging_bytes
from penstock.engine.host_memory import KEPT_OVER_USED, keep_freed_pages, return_freed_pages
from penstock.engine.interface import Batch, Engine, EnginePlan, PendingGradients, compute
from penstock.engine.memory import MemoryAccount
from penstock.engine.null_engine import NullEngine
from penstock.engine.product_choices import ProductCase, SparseProducts, measured_sparsity
from penstock.engine.recompute_planner import (
    bytes_of_choice,
    can_fit,
    least_kept_bytes,
    plan_engine,
    predict_bytes,
)
from penstock.engine.row_split import Rows, micro_batches
from penstock.engine.shared_slots import SharedSlots
from penstock.engine.sharing import Sharing
from penstock.engine.sparse_weights import (
    SparseWeights,
    expected_layout_bytes,
    most_layout_bytes,
)
from penstock.engine.targets import TARGETS, Target, accelerators, choose_target, target_of
from penstock.engine.threads import set_threads, thread_count
from penstock.engine.torch_engine import TorchEngine
from penstock.engine.wafer_costs import MaskState, costs_at, stage_cycles_of
from penstock.engine.wafer_engine import StageCount, WaferEngine, counted_cycles
from penstock.engine.wafer_plan import KindPlan, WaferPlan, plan_wafer

__all__ = [
    "KEPT_OVER_USED",
    "TARGETS",
    "Batch",
    "DeviceThread",
    "Engine",
    "EnginePlan",
    "KindPlan",
    "MaskState",
    "Member",
    "MemoryAccount",
    "NullEngine",
    "PendingGradients",
    "ProductCase",
    "Rounds",
    "Rows",
    "SharedSlots",
    "Sharing",
    "SparseProducts",
    "SparseWeights",
    "StageCount",
    "Target",
    "TorchEngine",
    "WaferEngine",
    "WaferPlan",
    "accelerators",
    "bytes_of_choice",
    "can_fit",
    "choose_target",
    "compute",
    "costs_at",
    "counted_cycles",
    "expected_layout_bytes",
    "keep_freed_pages",
    "least_kept_bytes",
    "mask_staging_bytes",
    "measured_sparsity",
    "micro_batches",
    "most_layout_bytes",
    "plan_engine",
    "plan_wafer",
    "predict_bytes",
    "return_freed_pages",
    "set_threads",
    "stage_cycles_of",
    "target_of",
    "thread_count",
]
