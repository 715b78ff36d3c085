"""Activations as the sparse products take them: tensors `[tokens, features]` in host memory."""

import numpy as np
import torch

ACTIVATION_TYPES = (torch.float32, torch.bfloat16)
"""The types that the products know."""


def check_activations(name: str, x: torch.Tensor) -> None:
    """Reject what is not activations of a type that the products know, in host memory.

    Raises:
        ValueError: naming the tensor, the expected and the actual value.
    """
    if x.dtype not in ACTIVATION_TYPES or x.dim() != 2 or x.device.type != "cpu" or 0 in x.shape:
        raise ValueError(
            f"{name}: expected float32 or bfloat16 [tokens, features] in host memory, got "
            f"{x.dtype} {list(x.shape)} on {x.device}"
        )


def flat(x: torch.Tensor) -> np.ndarray:
    """Return a tensor's elements as a flat array, bfloat16 as uint16 patterns.

    Of a contiguous tensor it is the tensor's own memory.
    """
    x = x.detach().contiguous().view(-1)
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(np.uint16)
    return x.numpy()
