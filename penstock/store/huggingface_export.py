"""Export of weights as a Hugging Face folder that `from_pretrained` loads.

One weight after another is converted and written in pieces. An export therefore needs memory for a
piece of one weight, not for the model.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.errors import ConfigError
from penstock.io import durable
from penstock.store import tensor_file
from penstock.store.files import appearing_folder
from penstock.store.interface import WeightReader
from penstock.store.narrowing import narrowed
from penstock.store.roles import MASTER

MAX_SHARD_BYTES = 5 * 10**9
"""Size limit of a file; only a single larger tensor exceeds it."""

_PIECE_ELEMENTS = 4 << 20


def export_huggingface(
    weights: WeightReader,
    folder: Path,
    *,
    config: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    files: Sequence[Path] = (),
    buffers: Mapping[str, torch.Tensor] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Write a store's weights as a Hugging Face model folder.

    Args:
        weights: a store, whose pending updates are applied first, or saved weights.
        folder: must not exist yet, or be empty; it appears only when all its files are on disk.
        config: the content of `config.json`; `dtype` is set in it.
        dtype: float32, bfloat16 or float16, the type of the written weights (rounded, ties to
            even).
        files: copied into the folder under their own names, for example the tokenizer's.
        buffers: further tensors, written with their own types.
        max_shard_bytes: greatest size of the tensors in one file.

    Returns:
        The weight files.

    Raises:
        ConfigError: the folder is in use, a data type is not supported, or a weight does not fit
            its type.
        NonFiniteError: a weight holds NaN or infinity.
        StorageError: the disk is full, read-only or failing; no partial file remains.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"weights are exported as float32, bfloat16 or float16, not as {dtype}")
    weights.flush()
    buffers = buffers or {}
    tensor_file.refuse_unknown_types(buffers)
    entries = [tensor_file.Entry(name, dtype, shape) for name, shape in weights.shapes.items()]
    entries += [tensor_file.Entry(n, b.dtype, tuple(b.shape)) for n, b in buffers.items()]
    parameters = sum(math.prod(shape) for shape in weights.shapes.values())
    shards = _shards(entries, max_shard_bytes)
    names = _shard_names(len(shards))
    documents = _documents(config, dtype, parameters, shards, names)

    def pieces(entry: tensor_file.Entry) -> Iterator[np.ndarray]:
        if entry.name in buffers:
            return tensor_file.pieces_of(buffers[entry.name])
        return _pieces(weights, entry)

    needed_bytes = sum(tensor_file.file_bytes(shard) for shard in shards)
    with appearing_folder(folder, needed_bytes) as temporary:
        for name, shard in zip(names, shards, strict=True):
            tensor_file.write(temporary / name, shard, pieces)
        for name, document in documents.items():
            durable.write_file(temporary / name, json.dumps(document, indent=2).encode() + b"\n")
        for path in files:
            durable.write_file(temporary / path.name, path.read_bytes())
    return [folder / name for name in names]


def _shards(entries: Sequence[tensor_file.Entry], max_bytes: int) -> list[list[tensor_file.Entry]]:
    shards: list[list[tensor_file.Entry]] = [[]]
    held_bytes = 0
    for entry in entries:
        if shards[-1] and held_bytes + entry.bytes > max_bytes:
            shards.append([])
            held_bytes = 0
        shards[-1].append(entry)
        held_bytes += entry.bytes
    return [tensor_file.in_file_order(shard) for shard in shards]


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _documents(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    parameters: int,
    shards: Sequence[Sequence[tensor_file.Entry]],
    names: Sequence[str],
) -> dict[str, Mapping[str, Any]]:
    documents: dict[str, Mapping[str, Any]] = {
        "config.json": {**config, "dtype": str(dtype).removeprefix("torch.")}
    }
    if len(shards) > 1:
        documents["model.safetensors.index.json"] = {
            "metadata": {
                "total_parameters": parameters,
                "total_size": sum(entry.bytes for shard in shards for entry in shard),
            },
            "weight_map": {
                entry.name: name
                for name, shard in zip(names, shards, strict=True)
                for entry in shard
            },
        }
    return documents


def _pieces(weights: WeightReader, entry: tensor_file.Entry) -> Iterator[np.ndarray]:
    elements = math.prod(entry.shape)
    for begin in range(0, elements, _PIECE_ELEMENTS):
        end = min(begin + _PIECE_ELEMENTS, elements)
        values = weights.read(entry.name, MASTER, begin, end)
        yield narrowed(entry.name, values, entry.dtype).view(torch.uint8).numpy()
