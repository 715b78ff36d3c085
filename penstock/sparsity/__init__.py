"""Sparse weights: masks, their packed form, the policies by which masks change, and products.

A name is imported at first use, because the modules with kernels load a compiler.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.sparsity.compact_index import (
        compact_bytes as compact_bytes,
        index_from_compact as index_from_compact,
        max_compact_bytes as max_compact_bytes,
    )
    from penstock.sparsity.expanded_products import (
        ExpandedProducts as ExpandedProducts,
        MaskBitmap as MaskBitmap,
        bitmap_bytes as bitmap_bytes,
        expand as expand,
        expanded_bytes as expanded_bytes,
        expanded_product_bytes as expanded_product_bytes,
        expansion_bytes as expansion_bytes,
        host_bitmap as host_bitmap,
        selection_bytes as selection_bytes,
    )
    from penstock.sparsity.initial_masks import (
        balanced_index as balanced_index,
        densities as densities,
        kept_count as kept_count,
        magnitude_index as magnitude_index,
        random_index as random_index,
    )
    from penstock.sparsity.layout import SparseLayout as SparseLayout
    from penstock.sparsity.mask_change import (
        MaskChange as MaskChange,
        Remap as Remap,
        apply_change as apply_change,
        grown_entries as grown_entries,
        require_exact as require_exact,
        require_not_empty as require_not_empty,
    )
    from penstock.sparsity.packed_index import (
        PackedIndex as PackedIndex,
        empty_index as empty_index,
        expected_bytes as expected_bytes,
        full_index as full_index,
        index_from_bytes as index_from_bytes,
        index_of_mask as index_of_mask,
        index_of_positions as index_of_positions,
        joined as joined,
        max_bytes as max_bytes,
    )
    from penstock.sparsity.policies import (
        CountChange as CountChange,
        Densify as Densify,
        GradualMagnitude as GradualMagnitude,
        MaskSize as MaskSize,
        MaskUpdate as MaskUpdate,
        RigL as RigL,
        SparseEvolutionaryTraining as SparseEvolutionaryTraining,
        SparsityPolicy as SparsityPolicy,
        StaticMasks as StaticMasks,
        exchanging as exchanging,
        gradual_magnitude as gradual_magnitude,
    )
    from penstock.sparsity.product_choice import (
        Choice as Choice,
        DenseTiles as DenseTiles,
        SparseKernel as SparseKernel,
    )
    from penstock.sparsity.product_measurement import (
        cache_bytes as cache_bytes,
        choose_product as choose_product,
    )
    from penstock.sparsity.product_memory import (
        max_building_bytes as max_building_bytes,
        max_layout_bytes as max_layout_bytes,
        product_bytes as product_bytes,
        usual_layout_bytes as usual_layout_bytes,
    )
    from penstock.sparsity.products import (
        entries_of as entries_of,
        forward as forward,
        input_gradient as input_gradient,
        to_dense as to_dense,
        weight_gradient as weight_gradient,
    )
    from penstock.sparsity.radix_selection import (
        Histogram as Histogram,
        Order as Order,
        Selection as Selection,
        absent_histogram as absent_histogram,
        begin_selection as begin_selection,
        kept_histogram as kept_histogram,
        merged_histogram as merged_histogram,
        narrowed as narrowed,
        select as select,
        select_absent as select_absent,
        select_all as select_all,
        selection_key as selection_key,
    )
    from penstock.sparsity.sparsity_schedules import (
        ChangeTimes as ChangeTimes,
        DropFraction as DropFraction,
        SparsitySchedule as SparsitySchedule,
        drop_fraction_at as drop_fraction_at,
        require_sparsity as require_sparsity,
        sparsity_at as sparsity_at,
        steps_of as steps_of,
    )
    from penstock.sparsity.streamed import (
        SparseWeight as SparseWeight,
        StreamedWeight as StreamedWeight,
        matrix_shape as matrix_shape,
    )
    from penstock.sparsity.update_counts import (
        age_type as age_type,
        correction_ends as correction_ends,
        updates_by_age as updates_by_age,
    )
    from penstock.sparsity.weight_patterns import sparse_weights as sparse_weights

__getattr__ = lazily(__name__, __file__)
