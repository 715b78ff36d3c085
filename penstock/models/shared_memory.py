"""Rejects tensors of a module that share memory but are different objects.

A weight has one place in the store. If two parameters use the same memory, PyTorch's optimizers
update the memory once for each parameter, with separate gradients and states. A tied weight, which
is one parameter with two names, is updated once. Neither one weight nor two weights in the store
would therefore train as the module does. A buffer that is a view of a weight would keep the
weight's initial values.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.errors import CompileError

# Tensors whose elements interleave are compared one by one up to this many bytes of memory.
_COMPARED_BYTES = 2**28


def refuse_shared_memory(module: nn.Module) -> None:
    """Raise if a parameter shares memory with another tensor of the module, or is a buffer too, or
    if a tensor has no memory of its elements alone, such as a sparse one.

    Adjacent parameters in one memory are allowed, as in `nn.LSTM` on a GPU.

    **Raises:** `CompileError` naming the tensors and what to do.
    """
    _refuse_other_layouts(module)
    known: set[int] = set()
    parameters: dict[int, list[tuple[str, nn.Parameter]]] = {}  # by storage
    for name, parameter in module.named_parameters():
        known.add(id(parameter))
        here = parameters.setdefault(_storage(parameter), [])
        for other, first in here:
            if _overlap(first, parameter):
                raise CompileError(
                    f"the weights {other!r} and {name!r} share memory without being one parameter, "
                    "so an optimizer would update this memory twice. To tie them, assign the "
                    "parameter itself (b.weight = a.weight, without .data); otherwise give one of "
                    "them a copy (.clone())."
                )
        here.append((name, parameter))
    for name, buffer in module.named_buffers():
        for weight, parameter in parameters.get(_storage(buffer), ()):
            if buffer is parameter:
                raise CompileError(
                    f"the buffer {name!r} is the weight {weight!r} itself, and a tensor is either "
                    "trained or constant. To use the weight, assign it as an attribute without "
                    "register_buffer; for a constant, register a copy (.detach().clone())."
                )
    for name, tensor in _other_tensors(module):
        if id(tensor) in known:
            continue
        for weight, over in parameters.get(_storage(tensor), ()):
            if _overlap(over, tensor):
                raise CompileError(
                    f"{name!r} shares memory with the weight {weight!r}, and would keep its first "
                    "values while the weight trains. Compute it in forward, or register a copy "
                    "(.clone())."
                )


def _refuse_other_layouts(module: nn.Module) -> None:
    """Raise for tensors whose elements have no memory that can be compared: sparse, nested or
    quantized ones, and those of lazy layers."""
    for name, tensor in (*module.named_parameters(), *_other_tensors(module)):
        if is_lazy(tensor):
            raise CompileError(
                f"{name!r} has no shape yet: call the module once, so that its lazy layers get "
                "their weights"
            )
        special = [kind for kind in ("nested", "quantized") if getattr(tensor, f"is_{kind}")]
        if special or tensor.layout is not torch.strided:
            kind = special[0] if special else str(tensor.layout).removeprefix("torch.")
            raise CompileError(
                f"{name!r} is a tensor of another kind ({kind}) than the dense ones that a program "
                "reads: register a dense copy (.to_dense(), .dequantize() or .to_padded_tensor()), "
                "or the parts of a sparse one, its indices and values, as buffers"
            )


def _other_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield buffers, and tensors in attributes of modules or in lists and mappings there."""
    yield from module.named_buffers()
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            full = f"{path}.{name}" if path else name
            for tensor in _contained(value):
                yield full, tensor


def _contained(value: object) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [item for item in value if isinstance(item, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have a common element."""
    if not one.numel() or not other.numel():
        return False
    (start, end), (other_start, other_end) = _range(one), _range(other)
    if end <= other_start or other_end <= start:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    if max(end, other_end) > _COMPARED_BYTES:
        return True
    touched = np.zeros(max(end, other_end), np.bool_)
    _bytes_of(touched, one)[...] = True
    return bool(_bytes_of(touched, other).any())


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return int(start), int(start + (reach + 1) * tensor.element_size())


def _bytes_of(memory: np.ndarray, tensor: torch.Tensor) -> np.ndarray:
    """Return a view of the bytes of `memory` at which a tensor lies in its storage."""
    size = tensor.element_size()
    return np.lib.stride_tricks.as_strided(
        memory[tensor.storage_offset() * size :],
        (*tensor.shape, size),
        (*(step * size for step in tensor.stride()), 1),
    )
