"""The rule of a run's masks: the first mask of every sparse weight, and the policy of changes."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.errors import ConfigError
from penstock.sparsity import (
    PackedIndex,
    SparsityPolicy,
    StaticMasks,
    age_type,
    balanced_index,
    index_of_mask,
    kept_count,
    magnitude_index,
    random_index,
    require_not_empty,
)
from penstock.store.holding import Holding, whole_capacities
from penstock.store.packed import index_memory

DENSE, GROWN, CHANGE = "dense gradients", "grown entries", "mask change"
"""The uses of memory of a step that changes masks, by which `mask_memory` names them."""

_VALUE_BYTES = 4
_CHANGE_BYTES = 24  # per entry of the largest weight: its numbers before and after, and its values

InitialMask = Literal["random", "magnitude", "balanced", "zeros"]


@dataclass(frozen=True)
class MaskRule:
    """What decides the masks of a run, besides weights and gradients.

    Attributes:
        policy: how masks change.
        seed: seed of the run.
        initial_mask: the entries at the start: random ones, those of the greatest magnitude, random
            ones with equally many per row, or those that are not zero in the loaded weights.
        densities: share of the entries that each sparse weight keeps at the start; of no use with
            `zeros`.
    """

    policy: SparsityPolicy
    seed: int
    initial_mask: InitialMask
    densities: Mapping[str, float]

    def initial(self, name: str, shape: tuple[int, ...], values: np.ndarray) -> PackedIndex:
        """Return the mask of a weight at the start.

        Args:
            name: name of the weight.
            shape: shape of the whole weight.
            values: float32 `[elements]`, the dense weight.

        Raises:
            ConfigError: the mask would keep no entry, or the weight has no density.
            NonFiniteError: a value is NaN or infinite, and the mask depends on magnitudes.
        """
        elements = math.prod(shape)
        if self.initial_mask == "zeros":
            mask = values != 0
            require_not_empty(name, int(np.count_nonzero(mask)))
            return index_of_mask(mask)
        if name not in self.densities:
            raise ConfigError(
                f"sparsity: expected a density for every sparse weight, got none for {name}; name "
                "it in sparsity.weights, or leave it out of the sparse ones"
            )
        kept = kept_count(name, elements, self.densities[name])
        if self.initial_mask == "magnitude":
            return magnitude_index(self.seed, name, values, kept)
        if self.initial_mask == "balanced":
            return balanced_index(self.seed, name, shape, kept)
        return random_index(self.seed, name, elements, kept)

    def age_type(self, betas: tuple[float, ...]) -> type[np.unsignedinteger] | None:
        """Return the type of the entries' ages for an optimizer that corrects the bias of these
        decay rates; None if ages are not needed."""
        between = self.policy.updates_between_changes
        return age_type(betas, between) if betas and between is not None else None


def mask_memory(holding: Holding, rule: MaskRule | None) -> dict[str, int]:
    """Return the most memory of the masks of a store, by use. Empty if no weight is sparse.

    The uses are the masks, the dense gradients of weights that several stages use, until all parts
    have arrived, the entries that dense gradients grow, until they are applied, and the change of
    one mask. A shard keeps as many entries as the whole weight may grow, with their gradients.

    Args:
        holding: the content of the store.
        rule: says how masks change; None: not at all.
    """
    sparse = [spec for spec in holding.weights.values() if spec.is_sparse]
    if not sparse:
        return {}
    policy = StaticMasks() if rule is None else rule.policy
    trained = [spec for spec in sparse if spec.trainable]
    masks = sum(index_memory(spec.capacity, spec.elements) for spec in sparse)
    masks += max(spec.index_bytes for spec in sparse)  # one in its compact form
    share, grown, dense = policy.grown_by_gradient, 0, 0
    capacities = whole_capacities(holding)
    uses = Counter(name for stage in holding.stages for name in stage.weights)
    for spec in trained if share else ():
        capacity = spec.capacity if capacities is None else capacities[spec.name]
        count = min(int(share * capacity), spec.elements)
        grown += index_memory(count, spec.elements)
        grown += 0 if capacities is None else _VALUE_BYTES * count
        dense += _VALUE_BYTES * spec.elements if uses[spec.name] > 1 else 0
    changing = () if isinstance(policy, StaticMasks) else trained
    largest = max((spec.capacity for spec in changing), default=0)
    change = _CHANGE_BYTES * largest
    return {"index": masks, DENSE: dense, GROWN: grown, CHANGE: change}


def passing_bytes(memory: Mapping[str, int]) -> int:
    """Return the bytes, of the uses of `mask_memory`, that only a step that changes masks takes."""
    return sum(memory.get(use, 0) for use in (DENSE, GROWN, CHANGE))
