"""Activations as panels of tokens, in which consecutive sparse products pass them on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from penstock.kernels.sparse_panels import pack, panel_count, unpack

ACTIVATION_TYPES = {torch.float32: 16, torch.bfloat16: 32}
"""The types that the products know, and the tokens of a vector of each."""


@dataclass(frozen=True)
class Panels:
    """Activations `[panel][feature][token]`.

    What works element by element (an activation function, a sum of two) may be applied to `data`.
    Tokens that fill the last panel have no meaning. A weight gradient needs them to be 0 in the
    gradient and finite in the input, as `to_panels` and the products leave them.

    Attributes:
        data: float32 or bfloat16, flat.
        tokens, features: what is in them.
        panel_tokens: tokens of a panel.
    """

    data: torch.Tensor
    tokens: int
    features: int
    panel_tokens: int


def to_panels(x: torch.Tensor, panel_tokens: int) -> Panels:
    """Return activations `[tokens, features]`, float32 or bfloat16, as panels.

    Raises:
        ValueError: another type or number of dimensions, or a panel is not whole vectors.
    """
    check_activations("activations", x)
    tokens, features = x.shape
    panels = empty_panels(x.dtype, tokens, features, panel_tokens)
    pack(flat(x), flat(panels.data), (tokens, features), panel_tokens)
    return panels


def from_panels(panels: Panels) -> torch.Tensor:
    """Return panels as activations `[tokens, features]`."""
    x = torch.empty(panels.tokens, panels.features, dtype=panels.data.dtype)
    unpack(flat(panels.data), flat(x), (panels.tokens, panels.features), panels.panel_tokens)
    return x


def empty_panels(dtype: torch.dtype, tokens: int, features: int, panel_tokens: int) -> Panels:
    """Return panels that are yet to be written.

    Raises:
        ValueError: a panel is not whole vectors.
    """
    step = ACTIVATION_TYPES[dtype]
    if panel_tokens <= 0 or panel_tokens % step:
        raise ValueError(
            f"panel_tokens: expected a multiple of {step} for {dtype}, got {panel_tokens}"
        )
    length = panel_count(tokens, panel_tokens) * features * panel_tokens
    return Panels(torch.empty(length, dtype=dtype), tokens, features, panel_tokens)


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
