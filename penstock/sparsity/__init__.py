"""Sparse weights: masks, their packed form, the policies by which masks change, and products.

A name is imported at first use, because the modules with kernels load a compiler.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.sparsity.ages import age_type, correction_ends, updates_by_age
    from penstock.sparsity.choice import Choice, DenseTiles, SparseKernel
    from penstock.sparsity.compact_index import (
        compact_bytes,
        index_from_compact,
        max_compact_bytes,
    )
    from penstock.sparsity.initial_masks import (
        balanced_index,
        densities,
        kept_count,
        magnitude_index,
        random_index,
    )
    from penstock.sparsity.layout import SparseLayout
    from penstock.sparsity.mask_change import (
        MaskChange,
        Remap,
        apply_change,
        grown_entries,
        require_exact,
        require_not_empty,
    )
    from penstock.sparsity.measurement import choose_product
    from penstock.sparsity.packed_index import (
        PackedIndex,
        empty_index,
        full_index,
        index_from_bytes,
        index_of_mask,
        index_of_positions,
        joined,
        max_bytes,
    )
    from penstock.sparsity.policies import (
        CountChange,
        Densify,
        GradualMagnitude,
        MaskSize,
        MaskUpdate,
        RigL,
        SparseEvolutionaryTraining,
        SparsityPolicy,
        StaticMasks,
        exchanging,
        gradual_magnitude,
    )
    from penstock.sparsity.product_memory import (
        max_building_bytes,
        max_layout_bytes,
        product_bytes,
    )
    from penstock.sparsity.products import (
        entries_of,
        forward,
        input_gradient,
        to_dense,
        weight_gradient,
    )
    from penstock.sparsity.radix_selection import (
        Histogram,
        Order,
        Selection,
        absent_histogram,
        begin_selection,
        kept_histogram,
        merged_histogram,
        narrowed,
        select,
        select_absent,
        select_all,
        selection_key,
    )
    from penstock.sparsity.sparsity_schedules import (
        ChangeTimes,
        DropFraction,
        SparsitySchedule,
        drop_fraction_at,
        sparsity_at,
        steps_of,
    )
    from penstock.sparsity.streamed import (
        SparseWeight,
        StreamedWeight,
    )
    from penstock.sparsity.weight_patterns import sparse_weights

__all__ = [
    "ChangeTimes",
    "Choice",
    "CountChange",
    "DenseTiles",
    "Densify",
    "DropFraction",
    "GradualMagnitude",
    "Histogram",
    "MaskChange",
    "MaskSize",
    "MaskUpdate",
    "Order",
    "PackedIndex",
    "Remap",
    "RigL",
    "Selection",
    "SparseEvolutionaryTraining",
    "SparseKernel",
    "SparseLayout",
    "SparseWeight",
    "SparsityPolicy",
    "SparsitySchedule",
    "StaticMasks",
    "StreamedWeight",
    "absent_histogram",
    "age_type",
    "apply_change",
    "balanced_index",
    "begin_selection",
    "choose_product",
    "compact_bytes",
    "correction_ends",
    "densities",
    "drop_fraction_at",
    "empty_index",
    "entries_of",
    "exchanging",
    "forward",
    "full_index",
    "gradual_magnitude",
    "grown_entries",
    "index_from_bytes",
    "index_from_compact",
    "index_of_mask",
    "index_of_positions",
    "input_gradient",
    "joined",
    "kept_count",
    "kept_histogram",
    "magnitude_index",
    "max_building_bytes",
    "max_bytes",
    "max_compact_bytes",
    "max_layout_bytes",
    "merged_histogram",
    "narrowed",
    "product_bytes",
    "random_index",
    "require_exact",
    "require_not_empty",
    "select",
    "select_absent",
    "select_all",
    "selection_key",
    "sparse_weights",
    "sparsity_at",
    "steps_of",
    "to_dense",
    "updates_by_age",
    "weight_gradient",
]

_MODULES = {
    "choice": ("Choice", "DenseTiles", "SparseKernel"),
    "layout": ("SparseLayout",),
    "measurement": ("choose_product",),
    "product_memory": ("max_building_bytes", "max_layout_bytes", "product_bytes"),
    "products": (
        "entries_of",
        "forward",
        "input_gradient",
        "to_dense",
        "weight_gradient",
    ),
    "compact_index": ("compact_bytes", "index_from_compact", "max_compact_bytes"),
    "ages": (
        "age_type",
        "correction_ends",
        "updates_by_age",
    ),
    "initial_masks": (
        "balanced_index",
        "densities",
        "kept_count",
        "magnitude_index",
        "random_index",
    ),
    "mask_change": (
        "MaskChange",
        "Remap",
        "apply_change",
        "grown_entries",
        "require_exact",
        "require_not_empty",
    ),
    "packed_index": (
        "PackedIndex",
        "empty_index",
        "full_index",
        "index_from_bytes",
        "index_of_mask",
        "index_of_positions",
        "joined",
        "max_bytes",
    ),
    "policies": (
        "CountChange",
        "Densify",
        "GradualMagnitude",
        "MaskSize",
        "MaskUpdate",
        "RigL",
        "SparseEvolutionaryTraining",
        "SparsityPolicy",
        "StaticMasks",
        "exchanging",
        "gradual_magnitude",
    ),
    "streamed": ("SparseWeight", "StreamedWeight"),
    "weight_patterns": ("sparse_weights",),
    "sparsity_schedules": (
        "ChangeTimes",
        "DropFraction",
        "SparsitySchedule",
        "drop_fraction_at",
        "sparsity_at",
        "steps_of",
    ),
    "radix_selection": (
        "Order",
        "Selection",
        "Histogram",
        "absent_histogram",
        "merged_histogram",
        "begin_selection",
        "kept_histogram",
        "narrowed",
        "select",
        "select_absent",
        "select_all",
        "selection_key",
    ),
}

__getattr__ = lazily(
    __name__, {name: module for module, names in _MODULES.items() for name in names}
)
