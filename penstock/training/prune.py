"""Pruning of a checkpoint in one shot: every weight keeps its entries of the greatest magnitude."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.models import ModelSource
from penstock.sparsity import (
    PackedIndex,
    densities,
    kept_count,
    magnitude_index,
    require_sparsity,
    sparse_weights,
)
from penstock.store import MASTER, MAX_SHARD_BYTES
from penstock.training.export import export


@dataclass(frozen=True)
class Pruned:
    """What `prune_model` has written.

    Attributes:
        files: the new files.
        shapes, kept: shape and kept entries of each sparse weight.
        zeros: how many of the kept entries were 0 before; more than none if the weights were
            sparser already.
    """

    files: Sequence[Path]
    shapes: Mapping[str, tuple[int, ...]]
    kept: Mapping[str, int]
    zeros: int

    @property
    def sparsity(self) -> float:
        """The share of absent entries in all sparse weights."""
        elements = sum(math.prod(shape) for shape in self.shapes.values())
        return 1 - sum(self.kept.values()) / elements


def prune_model(
    folder: Path,
    out: Path,
    sparsity: float,
    *,
    patterns: Sequence[str] = (),
    keep_dense: Sequence[str] = (),
    distribution: str = "uniform",
    dtype: str = "fp32",
    packed: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Pruned:
    """Write a Hugging Face folder with the weights of another one, pruned by magnitude.

    One weight is in memory at a time.

    Args:
        folder: with `config.json` and safetensors.
        out: the new folder; must not exist yet, or be empty.
        sparsity: share of the entries that are set to zero, from 0 to below 1.
        patterns, keep_dense: name patterns of the weights to prune and to leave, as in
            `sparsity.weights` and `sparsity.keep_dense`.
        distribution: `uniform` or `erdos_renyi_kernel`.
        dtype: fp32, bf16 or fp16, the type of the written weights.
        packed: write values and masks instead of zeros; only Penstock reads this.
        max_shard_bytes: greatest size of a file.

    Raises:
        ConfigError: no such folder, a pattern that matches nothing, a sparsity outside its range,
            or a weight that would keep no entry.
        CorruptionError, NonFiniteError, StorageError: as in reading and writing of such folders.
    """
    require_sparsity("sparsity", sparsity)
    source = ModelSource.from_hf(folder)
    dense = source.embeddings_and_head()
    names = sparse_weights(source.shapes(), patterns, keep_dense, dense, source.aliases)
    shapes = {name: source.shapes()[name] for name in names}
    kept = {
        name: kept_count(name, math.prod(shapes[name]), density)
        for name, density in densities(distribution, shapes, sparsity).items()
    }
    weights = _PrunedWeights(source, kept)
    files = export(weights, source, None, out, dtype, max_shard_bytes, packed=packed)
    return Pruned(files, shapes, kept, sum(weights.zeros.values()))


class _PrunedWeights:
    """The weights of a model, of which some keep only their entries of the greatest magnitude."""

    def __init__(self, source: ModelSource, kept: Mapping[str, int]) -> None:
        self._source, self._kept = source, kept
        self.zeros: dict[str, int] = {}  # kept entries that are 0, of the weights that were read
        self._last: tuple[str, np.ndarray, PackedIndex | None] | None = None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every weight, by name."""
        return self._source.shapes()

    def flush(self) -> None:
        """Do nothing: a folder has no pending updates."""

    def mask(self, name: str) -> PackedIndex | None:
        """Return the mask of a weight that is pruned, or that was packed; None for the others."""
        return self._pruned(name)[1] if name in self._kept else self._source.mask(name)

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return elements `begin` to `end` of a weight, flat, float32."""
        if role != MASTER:
            raise KeyError(f"{name} has no {role}: pruned weights have no state")
        return self._pruned(name)[0][begin:end]

    def _pruned(self, name: str) -> tuple[np.ndarray, PackedIndex | None]:
        if self._last is None or self._last[0] != name:
            self._last = None  # freed before the next weight is read
            ((_, tensor),) = self._source.initial_weights(0, [name])
            values = tensor.detach().contiguous().view(-1).numpy()
            index = None
            if name in self._kept:
                index = magnitude_index(0, name, values, self._kept[name])
                values = np.where(index.mask(), values, np.float32(0))
                self.zeros[name] = index.kept - int(np.count_nonzero(values))
            self._last = (name, values, index)
        return self._last[1:]
