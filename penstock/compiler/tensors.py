"""The tensors within arguments and results, and the memory that tensors share."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


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
