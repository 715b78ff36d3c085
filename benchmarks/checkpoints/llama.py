"""A Llama checkpoint of random weights, written one file at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

VOCABULARY, SEED = 32_000, 0


class Size(NamedTuple):
    """The size of a model, and of the files of its checkpoint."""

    width: int
    inner: int
    layers: int
    shard_bytes: int


def make_llama(target: Path, size: Size) -> dict:
    """Write a bfloat16 Llama checkpoint to a new folder, with the libraries of others.

    Returns:
        the bytes of its tensors, its number of files and of parameters, and a hash per tensor.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // 64,
        num_key_value_heads=size.width // 64,
        max_position_embeddings=2048,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in LlamaForCausalLM(config).named_parameters()}
    shards: list[list[str]] = [[]]
    held = 0
    for name, shape in shapes.items():
        if held + 2 * shape.numel() > size.shard_bytes and shards[-1]:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += 2 * shape.numel()
    target.mkdir()
    config.save_pretrained(target)
    generator = torch.Generator().manual_seed(SEED)
    weight_map, hashes, total = {}, {}, 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            values = torch.randn(shapes[name], generator=generator).mul_(0.02)
            tensors[name] = (values + 1 if "norm" in name else values).bfloat16()
            hashes[name] = hash_of(tensors[name])
            weight_map[name] = file
            total += tensors[name].nbytes
        save_file(tensors, target / file, {"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    parameters = sum(shape.numel() for shape in shapes.values())
    return {"bytes": total, "files": len(shards), "parameters": parameters, "hashes": hashes}


def widen(folder: Path, target: Path) -> None:
    """Write a checkpoint's tensors in float32 to a new folder; their values stay the same."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
            save_file(tensors, target / path.name, {"format": "pt"})
        else:
            (target / path.name).write_bytes(path.read_bytes())


def hash_of(tensor) -> str:
    """Return a hash of a tensor's bytes."""
    import torch
    import xxhash

    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy())
