"""The rule of a run's masks: the first mask of every sparse weight, and the policy of changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.errors import ConfigError
from penstock.sparsity import (
    PackedIndex,
    SparsityPolicy,
    age_type,
    balanced_index,
    index_of_mask,
    kept_count,
    magnitude_index,
    random_index,
    require_not_empty,
)

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
