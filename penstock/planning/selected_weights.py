"""The weights of a model that a run trains, stores as bfloat16, or prunes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.compiler import select_trainable
from penstock.config import Config
from penstock.models import ModelSource

if TYPE_CHECKING:
    from penstock.planning.sparse_weights import SparsePlan


def trained_weights(config: Config, source: ModelSource) -> frozenset[str]:
    """Return the names of the weights that a run trains.

    **Raises:** `ConfigError` for a pattern of `train` or `freeze` that has no effect.
    """
    aliases: dict[str, list[str]] = {name: [] for name in source.shapes()}
    for other, first in source.aliases.items():
        if first in aliases:  # buffers may be tied too
            aliases[first].append(other)
    return select_trainable(
        aliases,
        source.trainable,
        train=config.train,
        freeze=config.freeze,
        adapters=source.adapter_weights,
    )


def kept_as_bfloat16(config: Config, source: ModelSource) -> frozenset[str]:
    """Return the weights that a new run stores as bfloat16: frozen and bfloat16 at their source."""
    if not source.bfloat16:
        return frozenset()
    return source.bfloat16 - trained_weights(config, source)


def sparse_weights_of(
    config: Config, source: ModelSource, recorded: Mapping[str, int] | None = None
) -> SparsePlan | None:
    """Return the sparse weights of a run; errors are those of `plan_sparse_weights`.

    **Arguments:** `recorded` are the entries at the start of a resumed run, by weight.
    """
    if config.sparsity.method is None:
        return None
    from penstock.planning.sparse_weights import plan_sparse_weights  # which loads a compiler

    return plan_sparse_weights(config, source, trained_weights(config, source), recorded)
