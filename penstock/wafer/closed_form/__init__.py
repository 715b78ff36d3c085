"""Cycles of a stage in closed form: what each operator costs, and which resource binds."""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.wafer.closed_form.acceleration import (
        acceleration_curve as acceleration_curve,
        saturation as saturation,
    )
    from penstock.wafer.closed_form.collectives import (
        ReduceAlgorithm as ReduceAlgorithm,
        all_reduce_cycles as all_reduce_cycles,
        fastest_all_reduce as fastest_all_reduce,
        line_broadcast_cycles as line_broadcast_cycles,
        line_reduce_cycles as line_reduce_cycles,
        relay_cycles as relay_cycles,
    )
    from penstock.wafer.closed_form.cycles import ProductCycles as ProductCycles
    from penstock.wafer.closed_form.layout import (
        ActivationLayout as ActivationLayout,
        candidate_layouts as candidate_layouts,
    )
    from penstock.wafer.closed_form.layout_choice import choose_layout as choose_layout
    from penstock.wafer.closed_form.operators import (
        attention as attention,
        lookup as lookup,
        memory_pass as memory_pass,
        norm as norm,
        token_sum as token_sum,
    )
    from penstock.wafer.closed_form.placement import (
        MaskCounts as MaskCounts,
        assign_rows as assign_rows,
        binomial_extremes as binomial_extremes,
        count_mask as count_mask,
        expected_load_factor as expected_load_factor,
    )
    from penstock.wafer.closed_form.recursions import (
        SumSteps as SumSteps,
        broadcast_finish as broadcast_finish,
        forward_finish as forward_finish,
    )
    from penstock.wafer.closed_form.skew import (
        ColumnWords as ColumnWords,
        RowLoad as RowLoad,
        forward_skew as forward_skew,
    )
    from penstock.wafer.closed_form.sparse_products import (
        PRODUCTS as PRODUCTS,
        data_gradient as data_gradient,
        forward as forward,
        step_cycles as step_cycles,
        weight_gradient as weight_gradient,
        whole_counts as whole_counts,
    )
    from penstock.wafer.closed_form.sram import (
        check_fits as check_fits,
        most_tokens as most_tokens,
        sram_use as sram_use,
    )
    from penstock.wafer.closed_form.stage import (
        StageCycles as StageCycles,
        choose_stage_layout as choose_stage_layout,
        stage_cycles as stage_cycles,
        stage_products as stage_products,
    )
    from penstock.wafer.closed_form.streamed_product import (
        HIDDEN as HIDDEN,
        PAID as PAID,
        StreamedProduct as StreamedProduct,
        StreamingOptions as StreamingOptions,
    )
    from penstock.wafer.closed_form.weight_shapes import (
        HeadShape as HeadShape,
        streams_weight as streams_weight,
    )

__getattr__ = lazily(__name__, __file__)
