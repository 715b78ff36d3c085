"""Hugging Face folders for tests, written by `transformers` and by the `safetensors` library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import FIELDS

FAMILIES = {
    "gpt2": ("gpt2", {}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "bert": ("bert", {}),
}
"""Model type and changes to the fields of `tiny_models`."""


def auto_class(family: str):
    """Return the class that a user of `transformers` would load the family with."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    return AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM


def model_of(family: str, seed: int = 0, dtype: torch.dtype = torch.float32):
    """Return a small model with random values in every weight, norms and biases too."""
    from transformers import AutoConfig

    model_type, changes = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**FIELDS[model_type], **changes})
    torch.manual_seed(seed)
    model = auto_class(family).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype)


def save(model, folder: Path, shard: str | None = None) -> Path:
    """Save a model as a user would; `shard` is a small `max_shard_size`."""
    model.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
    assert (folder / "model.safetensors.index.json").exists() == (shard is not None)
    return folder


Tensors = Mapping[str, torch.Tensor]


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Tensors | None]) -> Path:
    """Change the tensors of `model.safetensors`: in place, or to the mapping that is returned."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    changed = change(tensors)
    save_file(dict(tensors if changed is None else changed), path, {"format": "pt"})
    return folder


def set_config(folder: Path, **fields) -> Path:
    """Change fields of `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder
