"""Cycles of a stage in closed form: what each operator costs, and which resource binds."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.wafer.closed_form.acceleration import (
        SPARSITIES,
        AccelerationPoint,
        acceleration_curve,
        saturation,
    )
    from penstock.wafer.closed_form.collectives import (
        ReduceAlgorithm,
        all_reduce_cycles,
        fastest_all_reduce,
        line_broadcast_cycles,
        line_reduce_cycles,
        relay_cycles,
        spatial_cycles,
    )
    from penstock.wafer.closed_form.cycles import (
        ProductCycles,
    )
    from penstock.wafer.closed_form.layout import (
        ActivationLayout,
        candidate_layouts,
    )
    from penstock.wafer.closed_form.layout_choice import (
        LayoutChoice,
        choose_layout,
    )
    from penstock.wafer.closed_form.operators import (
        attention,
        lookup,
        memory_pass,
        norm,
        token_sum,
    )
    from penstock.wafer.closed_form.placement import (
        MaskCounts,
        assign_rows,
        binomial_extremes,
        count_mask,
        expected_load_factor,
    )
    from penstock.wafer.closed_form.recursions import (
        SumSteps,
        broadcast_finish,
        forward_finish,
    )
    from penstock.wafer.closed_form.skew import (
        ColumnWords,
        RowLoad,
        broadcast_skew,
        forward_skew,
    )
    from penstock.wafer.closed_form.sparse_products import (
        PRODUCTS,
        data_gradient,
        forward,
        step_cycles,
        weight_gradient,
        whole_counts,
    )
    from penstock.wafer.closed_form.sram import (
        SramUse,
        check_fits,
        most_tokens,
        sram_use,
    )
    from penstock.wafer.closed_form.stage import (
        OperatorCycles,
        StageCycles,
        choose_stage_layout,
        stage_cycles,
        stage_products,
    )
    from penstock.wafer.closed_form.streamed_product import (
        HIDDEN,
        PAID,
        StreamedProduct,
        StreamingOptions,
    )
    from penstock.wafer.closed_form.weight_shapes import (
        HeadShape,
        streams_weight,
    )

__all__ = [
    "HIDDEN",
    "PAID",
    "PRODUCTS",
    "SPARSITIES",
    "AccelerationPoint",
    "ActivationLayout",
    "ColumnWords",
    "HeadShape",
    "LayoutChoice",
    "MaskCounts",
    "OperatorCycles",
    "ProductCycles",
    "ReduceAlgorithm",
    "RowLoad",
    "SramUse",
    "StageCycles",
    "StreamedProduct",
    "StreamingOptions",
    "SumSteps",
    "acceleration_curve",
    "all_reduce_cycles",
    "assign_rows",
    "attention",
    "binomial_extremes",
    "broadcast_finish",
    "broadcast_skew",
    "candidate_layouts",
    "check_fits",
    "choose_layout",
    "choose_stage_layout",
    "count_mask",
    "data_gradient",
    "expected_load_factor",
    "fastest_all_reduce",
    "forward",
    "forward_finish",
    "forward_skew",
    "line_broadcast_cycles",
    "line_reduce_cycles",
    "lookup",
    "memory_pass",
    "most_tokens",
    "norm",
    "relay_cycles",
    "saturation",
    "spatial_cycles",
    "sram_use",
    "stage_cycles",
    "stage_products",
    "step_cycles",
    "streams_weight",
    "token_sum",
    "weight_gradient",
    "whole_counts",
]

__getattr__ = lazily(
    __name__,
    {
        "SPARSITIES": "acceleration",
        "AccelerationPoint": "acceleration",
        "acceleration_curve": "acceleration",
        "saturation": "acceleration",
        "ReduceAlgorithm": "collectives",
        "all_reduce_cycles": "collectives",
        "fastest_all_reduce": "collectives",
        "line_broadcast_cycles": "collectives",
        "line_reduce_cycles": "collectives",
        "relay_cycles": "collectives",
        "spatial_cycles": "collectives",
        "ProductCycles": "cycles",
        "ActivationLayout": "layout",
        "candidate_layouts": "layout",
        "LayoutChoice": "layout_choice",
        "choose_layout": "layout_choice",
        "attention": "operators",
        "lookup": "operators",
        "memory_pass": "operators",
        "norm": "operators",
        "token_sum": "operators",
        "MaskCounts": "placement",
        "assign_rows": "placement",
        "binomial_extremes": "placement",
        "count_mask": "placement",
        "expected_load_factor": "placement",
        "SumSteps": "recursions",
        "broadcast_finish": "recursions",
        "forward_finish": "recursions",
        "RowLoad": "skew",
        "ColumnWords": "skew",
        "broadcast_skew": "skew",
        "forward_skew": "skew",
        "HIDDEN": "streamed_product",
        "PAID": "streamed_product",
        "PRODUCTS": "sparse_products",
        "StreamedProduct": "streamed_product",
        "StreamingOptions": "streamed_product",
        "data_gradient": "sparse_products",
        "forward": "sparse_products",
        "step_cycles": "sparse_products",
        "weight_gradient": "sparse_products",
        "whole_counts": "sparse_products",
        "SramUse": "sram",
        "check_fits": "sram",
        "most_tokens": "sram",
        "sram_use": "sram",
        "OperatorCycles": "stage",
        "StageCycles": "stage",
        "choose_stage_layout": "stage",
        "stage_cycles": "stage",
        "stage_products": "stage",
        "HeadShape": "weight_shapes",
        "streams_weight": "weight_shapes",
    },
)
