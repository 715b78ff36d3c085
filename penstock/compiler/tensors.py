"""The tensors within arguments and results, and the memory that tensors share."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DEVICE = "_penstock_device"


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def may_need_gradient(value: Any) -> bool:
    """Return whether a value is a tensor of a type that autograd differentiates."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def storage_of(tensor: Tensor) -> int:
    """Return what identifies the memory of a tensor while it exists."""
    return int(tensor.untyped_storage()._cdata)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new contiguous tensor."""
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= max(length, 1)
    return tuple(reversed(strides))


def with_contiguous_strides(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of the same elements, without a gradient.

    `Tensor.contiguous` keeps the strides of dimensions of size 1 and of tensors without elements.
    """
    dense = tensor.detach().contiguous()
    return dense.as_strided(dense.shape, contiguous_strides(dense.shape))


def elements_of(tensor: Tensor) -> np.ndarray:
    """Return the elements of a contiguous tensor in host memory as a flat array of the same memory;
    bfloat16 numbers as patterns."""
    flat = tensor.detach().view(-1)
    return (flat.view(torch.uint16) if tensor.dtype == torch.bfloat16 else flat).numpy()


def standing_for(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the meta device that stands for one on `device`, see `device_of`.

    It needs no `FakeTensorMode`, whose constructor imports torch._dynamo, which takes seconds.
    """
    setattr(tensor, _DEVICE, device)
    return tensor


def device_of(tensor: Tensor) -> torch.device:
    """Return the device of a tensor, or that of the tensor it stands for."""
    found: torch.device = getattr(tensor, _DEVICE, tensor.device)
    return found
