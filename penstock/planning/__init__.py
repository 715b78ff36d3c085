"""The resources and the division of a run, decided before its first step."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.planning import (
        builders as builders,
        model_sources as model_sources,
        selected_weights as selected_weights,
        store_factory as store_factory,
    )
    from penstock.planning.builders import build_program as build_program
    from penstock.planning.execution_plan import (
        ExecutionPlan as ExecutionPlan,
        plan_execution as plan_execution,
    )
    from penstock.planning.kept_choices import forget_choices as forget_choices
    from penstock.planning.kept_pages import (
        keep_pages as keep_pages,
        settle_pages as settle_pages,
    )
    from penstock.planning.machine_limits import DeviceMemory as DeviceMemory, Machine as Machine
    from penstock.planning.memory_budget import RESERVE_BYTES as RESERVE_BYTES
    from penstock.planning.product_choices import (
        make_inference_engine as make_inference_engine,
        measure_current as measure_current,
        with_products as with_products,
    )
    from penstock.planning.program_cache import (
        OutlinedModels as OutlinedModels,
        library_bytes as library_bytes,
    )
    from penstock.planning.program_outline import outline_program as outline_program
    from penstock.planning.relays import relay_count as relay_count
    from penstock.planning.sequence_lengths import (
        awaits_records as awaits_records,
        built_dataset as built_dataset,
        sequence_length as sequence_length,
    )
    from penstock.planning.sparse_weights import mask_rule_of as mask_rule_of
    from penstock.planning.transfer_memory import transfer_buffer_bytes as transfer_buffer_bytes
    from penstock.planning.wafer import wafer_options as wafer_options, with_wafer as with_wafer

__getattr__ = lazily(__name__, __file__)
