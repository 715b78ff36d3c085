"""A hash of tensors by name, by which runs and processes tell models apart."""

from collections.abc import Mapping

import torch
import xxhash


def tensor_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of the names, shapes, types and values of tensors, in their order."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        digest.update(f"{name}\0{list(tensor.shape)}\0{tensor.dtype}\0".encode())
        values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.hexdigest()
