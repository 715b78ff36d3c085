"""The engine: computes one stage at a time and holds activations; stateless between steps.

A name is imported at first use: commands that only plan need few of these modules.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.engine.device_threads import (
        DeviceThread as DeviceThread,
        Member as Member,
        Rounds as Rounds,
    )
    from penstock.engine.expanded_weights import mask_staging_bytes as mask_staging_bytes
    from penstock.engine.host_memory import (
        KEPT_OVER_USED as KEPT_OVER_USED,
        HostMemory as HostMemory,
        end_setting as end_setting,
        freed_pages_kept as freed_pages_kept,
        keep_freed_pages as keep_freed_pages,
        map_tensors as map_tensors,
        return_free_pages as return_free_pages,
        return_unused_pages as return_unused_pages,
        share_one_heap as share_one_heap,
    )
    from penstock.engine.interface import (
        Batch as Batch,
        Engine as Engine,
        EnginePlan as EnginePlan,
        PendingGradients as PendingGradients,
        compute as compute,
    )
    from penstock.engine.memory import MemoryAccount as MemoryAccount
    from penstock.engine.null_engine import NullEngine as NullEngine
    from penstock.engine.product_choices import (
        ProductCase as ProductCase,
        SparseProducts as SparseProducts,
        measured_sparsity as measured_sparsity,
    )
    from penstock.engine.recompute_planner import (
        bytes_of_choice as bytes_of_choice,
        can_fit as can_fit,
        least_kept_bytes as least_kept_bytes,
        plan_engine as plan_engine,
        predict_bytes as predict_bytes,
    )
    from penstock.engine.row_split import Rows as Rows, micro_batches as micro_batches
    from penstock.engine.shared_slots import SharedSlots as SharedSlots
    from penstock.engine.sharing import Sharing as Sharing
    from penstock.engine.sparse_weights import (
        SparseWeights as SparseWeights,
        expected_layout_bytes as expected_layout_bytes,
        most_layout_bytes as most_layout_bytes,
    )
    from penstock.engine.targets import (
        TARGETS as TARGETS,
        Target as Target,
        accelerators as accelerators,
        choose_target as choose_target,
        target_of as target_of,
    )
    from penstock.engine.threads import set_threads as set_threads, thread_count as thread_count
    from penstock.engine.torch_engine import TorchEngine as TorchEngine
    from penstock.engine.wafer_costs import (
        MaskState as MaskState,
        costs_at as costs_at,
        stage_cycles_of as stage_cycles_of,
    )
    from penstock.engine.wafer_engine import (
        WaferEngine as WaferEngine,
        counted_cycles as counted_cycles,
    )
    from penstock.engine.wafer_plan import WaferPlan as WaferPlan, plan_wafer as plan_wafer

__getattr__ = lazily(__name__, __file__)
