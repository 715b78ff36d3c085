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
        all_reduce_cycles,
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
    from penstock.wafer.closed_form.skew import (
        RowLoad,
        broadcast_finish,
        broadcast_skew,
        forward_finish,
        forward_skew,
    )
    from penstock.wafer.closed_form.sparse_products import (
        HIDDEN,
        PAID,
        PRODUCTS,
        StreamedProduct,
        StreamingOptions,
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
    from penstock.wafer.closed_form.weight_shapes import (
        HeadShape,
        WeightShape,
        weight_shape,
    )

__all__ = [
    "HIDDEN",
    "PAID",
    "PRODUCTS",
    "SPARSITIES",
    "AccelerationPoint",
    "ActivationLayout",
    "HeadShape",
    "LayoutChoice",
    "MaskCounts",
    "OperatorCycles",
    "ProductCycles",
    "RowLoad",
    "SramUse",
    "StageCycles",
    "StreamedProduct",
    "StreamingOptions",
    "WeightShape",
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
    "token_sum",
    "weight_gradient",
    "weight_shape",
    "whole_counts",
]

__getattr__ = lazily(
    __name__,
    {
        "SPARSITIES": "acceleration",
        "AccelerationPoint": "acceleration",
        "acceleration_curve": "acceleration",
        "saturation": "acceleration",
        "all_reduce_cycles": "collectives",
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
        "RowLoad": "skew",
        "broadcast_finish": "skew",
        "broadcast_skew": "skew",
        "forward_finish": "skew",
        "forward_skew": "skew",
        "HIDDEN": "sparse_products",
        "PAID": "sparse_products",
        "PRODUCTS": "sparse_products",
        "StreamedProduct": "sparse_products",
        "StreamingOptions": "sparse_products",
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
        "WeightShape": "weight_shapes",
        "weight_shape": "weight_shapes",
    },
)
