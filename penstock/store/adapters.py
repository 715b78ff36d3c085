"""Export of low-rank adapters: merged into the weights, or alone in PEFT's format.

A merged weight is W + (alpha / rank) B A in float32. Only the rows that are being written are
computed, so merging takes no more memory than a plain export.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.io import durable
from penstock.store import tensor_file
from penstock.store.files import appearing_folder
from penstock.store.interface import WeightReader
from penstock.store.narrowing import narrowed
from penstock.store.packed_export import mask_of
from penstock.store.roles import MASTER

if TYPE_CHECKING:
    from penstock.models import Adapter
    from penstock.sparsity import PackedIndex

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
# PEFT wraps the model twice. These are the attributes that PEFT looks the layers up by.
_PEFT_PREFIX = "base_model.model."
_TASKS = {"causal_lm": "CAUSAL_LM"}  # PEFT has no name for the others


class MergedWeights:
    """Weights with the product of each adapter added to the weight that the adapter belongs to."""

    def __init__(self, weights: WeightReader, adapters: Mapping[str, Adapter]) -> None:
        self._weights = weights
        self._adapters = adapters
        own = {name for adapter in adapters.values() for name in (adapter.down, adapter.up)}
        self.shapes = {name: s for name, s in weights.shapes.items() if name not in own}

    def flush(self) -> None:
        """Apply all pending updates."""
        self._weights.flush()

    def read(self, name: str, role: str, begin: int, end: int) -> np.ndarray:
        """Return elements `begin` to `end` of a weight, flat, with its adapter merged if it has
        one."""
        values = self._weights.read(name, role, begin, end)
        if name not in self._adapters or role != MASTER:
            return values
        adapter = self._adapters[name]
        columns = self.shapes[name][1]
        first, last = begin // columns, -(-end // columns)
        down, up = self._matrix(adapter.down), self._matrix(adapter.up)
        # [rows, columns] of the weight: of B A, or of its transpose
        product = down[:, first:last].T @ up.T if adapter.transposed else up[first:last] @ down
        inside = slice(begin - first * columns, end - first * columns)
        return values + np.float32(adapter.scale) * product.reshape(-1)[inside]

    def mask(self, name: str) -> PackedIndex | None:
        """Return the mask of a sparse weight; None for a dense one, and for one whose adapter fills
        the entries that the mask lacks."""
        return None if name in self._adapters else mask_of(self._weights, name)

    def _matrix(self, name: str) -> np.ndarray:
        shape = self._weights.shapes[name]
        return self._weights.read(name, MASTER, 0, math.prod(shape)).reshape(shape)


def export_adapters(
    weights: WeightReader,
    folder: Path,
    adapters: Mapping[str, Adapter],
    *,
    task: str,
    base: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Path]:
    """Write the adapters alone, in the format that the PEFT library writes and reads.

    Args:
        weights: a store, whose pending updates are applied first, or saved weights.
        folder: must not exist yet, or be empty; it appears only when all its files are on disk.
        adapters: by the names of the weights that they adapt.
        task: the task type of the model.
        base: where PEFT loads the base model from, if known.
        dtype: the type in which adapters are written.

    Returns:
        The weight file.

    Raises:
        ConfigError: the folder is in use, or a weight does not fit the data type.
        NonFiniteError: a weight holds NaN or infinity.
        StorageError: the disk is full, read-only or failing; no partial file remains.
    """
    own = [name for adapter in adapters.values() for name in (adapter.down, adapter.up)]
    weights.flush()
    entries = {
        tensor_file.Entry(_PEFT_PREFIX + name, dtype, weights.shapes[name]): name for name in own
    }

    def pieces(entry: tensor_file.Entry) -> Iterator[np.ndarray]:
        name = entries[entry]
        values = weights.read(name, MASTER, 0, math.prod(entry.shape))
        yield from tensor_file.pieces_of(narrowed(name, values, dtype))

    with appearing_folder(folder, tensor_file.file_bytes(list(entries))) as temporary:
        tensor_file.write(temporary / WEIGHTS_FILE, list(entries), pieces)
        document = _peft_config(adapters, task, base)
        durable.write_file(temporary / CONFIG_FILE, json.dumps(document, indent=2).encode() + b"\n")
    return [folder / WEIGHTS_FILE]


def _peft_config(adapters: Mapping[str, Adapter], task: str, base: str | None) -> dict[str, object]:
    any_adapter = next(iter(adapters.values()))
    return {
        "peft_type": "LORA",
        "task_type": _TASKS.get(task),
        "base_model_name_or_path": base,
        "r": any_adapter.rank,
        "lora_alpha": any_adapter.alpha,
        "lora_dropout": any_adapter.dropout,
        "target_modules": [adapter.path for adapter in adapters.values()],
        "fan_in_fan_out": all(adapter.transposed for adapter in adapters.values()),
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
