"""Tensors that look trainable but are no parameters of their module: no optimizer gets them.

`model.parameters()` of PyTorch does not contain a buffer, a plain tensor, nor what a module keeps
in a Python list or mapping. Their gradients would go nowhere.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_REGISTERED = ("_parameters", "_buffers", "_modules")  # attributes of every module


def unregistered_weights(module: nn.Module) -> list[str]:
    """Return the names of tensors that require a gradient but are no parameters of `module`.

    They are buffers, attributes, or within lists, tuples and mappings in attributes, such as
    `layers[0].weight`.
    """
    known = {id(parameter) for parameter in module.parameters()}
    found: dict[int, str] = {}
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        held = {name: value for name, value in vars(owner).items() if name not in _REGISTERED}
        for name, value in {**owner._buffers, **held}.items():
            for full, tensor in _tensors_in(prefix + name, value, set()):
                if tensor.requires_grad and id(tensor) not in known:
                    found.setdefault(id(tensor), full)
    return list(found.values())


def _tensors_in(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in an attribute by name; `seen` are the ids of the containers around."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{inner}", tensor) for inner, tensor in value.named_parameters())
    elif isinstance(value, list | tuple | dict) and id(value) not in seen:
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _tensors_in(f"{name}[{key!r}]", part, {*seen, id(value)})
