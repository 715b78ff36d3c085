"""Sparse weights: masks, their packed form, and the policies by which masks change.

A name is imported at first use, because the modules with kernels load a compiler.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily

if TYPE_CHECKING:
    from penstock.sparsity.ages import Ages, age_type, correction_ends, updates_by_age
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
    from penstock.sparsity.mask_change import MaskChange, Remap, apply_change, require_exact
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
    from penstock.sparsity.sparsity_schedules import (
        ChangeTimes,
        DropFraction,
        SparsitySchedule,
        drop_fraction_at,
        sparsity_at,
        steps_of,
    )
    from penstock.sparsity.votes import (
        Order,
        Selection,
        Votes,
        absent_votes,
        added,
        begin_selection,
        kept_votes,
        narrowed,
        select,
        select_absent,
        select_all,
        selection_key,
    )
    from penstock.sparsity.weight_patterns import sparse_weights

__all__ = [
    "Ages",
    "ChangeTimes",
    "CountChange",
    "Densify",
    "DropFraction",
    "GradualMagnitude",
    "MaskChange",
    "MaskSize",
    "MaskUpdate",
    "Order",
    "PackedIndex",
    "Remap",
    "RigL",
    "Selection",
    "SparseEvolutionaryTraining",
    "SparsityPolicy",
    "SparsitySchedule",
    "StaticMasks",
    "Votes",
    "absent_votes",
    "added",
    "age_type",
    "apply_change",
    "balanced_index",
    "begin_selection",
    "compact_bytes",
    "correction_ends",
    "densities",
    "drop_fraction_at",
    "empty_index",
    "exchanging",
    "full_index",
    "gradual_magnitude",
    "index_from_bytes",
    "index_from_compact",
    "index_of_mask",
    "index_of_positions",
    "joined",
    "kept_count",
    "kept_votes",
    "magnitude_index",
    "max_bytes",
    "max_compact_bytes",
    "narrowed",
    "random_index",
    "require_exact",
    "select",
    "select_absent",
    "select_all",
    "selection_key",
    "sparse_weights",
    "sparsity_at",
    "steps_of",
    "updates_by_age",
]

_MODULES = {
    "compact_index": ("compact_bytes", "index_from_compact", "max_compact_bytes"),
    "ages": (
        "Ages",
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
        "require_exact",
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
    "weight_patterns": ("sparse_weights",),
    "sparsity_schedules": (
        "ChangeTimes",
        "DropFraction",
        "SparsitySchedule",
        "drop_fraction_at",
        "sparsity_at",
        "steps_of",
    ),
    "votes": (
        "Order",
        "Selection",
        "Votes",
        "absent_votes",
        "added",
        "begin_selection",
        "kept_votes",
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
