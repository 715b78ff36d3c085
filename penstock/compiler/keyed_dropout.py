"""Dropout as a pure function of a key: replay and recomputation use the same mask."""

import torch
from torch import Tensor


def dropout(value: Tensor, key: Tensor, number: int, probability: float) -> Tensor:
    """Zero each element with `probability` and scale the others by 1 / (1 - probability).

    **Arguments:** `value` of any shape; `key` int64 [2]: a number that the engine derives from
    (seed, step, micro-batch), and the number of the stage's first dropout in the whole model;
    `number`: the distance of this dropout from that one.
    """
    if probability >= 1.0:
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    drawn_from, first = key.tolist()
    place = first + number
    if value.device.type == "cpu":
        from penstock.kernels import philox  # loads a compiler

        mask = torch.empty(value.shape, dtype=torch.uint8)
        philox.dropout_mask(mask.view(-1).numpy(), drawn_from, place, 1.0 - probability)
        keep = mask.view(torch.bool)
    else:
        # The device's own generator is also a Philox; its stream differs from the CPU's.
        generator = torch.Generator(device=value.device)
        generator.manual_seed((drawn_from + 0x9E3779B97F4A7C15 * (place + 1)) & ((1 << 63) - 1))
        draws = torch.rand(value.shape, generator=generator, device=value.device)
        keep = draws < 1.0 - probability
    return torch.where(keep, value * (1.0 / (1.0 - probability)), 0.0).contiguous()
