"""Makes the fake parameters of an export without the general conversion.

An export copies every parameter and buffer of a module into its own fake mode, by a conversion that
describes views, storages and subclasses. That is a tenth of the compilation of a deep model, whose
parameters are fake tensors that fill their memory and share it with nothing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from penstock.compiler.tensors import storage_of


@contextmanager
def simple_copies() -> Iterator[None]:
    """Context of an export in which simple fake parameters and buffers are copied directly.

    The copies have the metadata that the conversion gives them, and it finds them afterwards. All
    other tensors are converted.
    """
    from torch.export import _trace  # imports torch._dynamo, which takes seconds

    module: Any = _trace
    convert = module._fakify_params_buffers

    def copy_or_convert(fake_mode: FakeTensorMode, owner: nn.Module) -> Mapping[str, Tensor]:
        with torch._C.DisableTorchFunction():
            copies = _copy_simple(fake_mode, owner)  # which the mode refers to weakly
        converted: Mapping[str, Tensor] = convert(fake_mode, owner)
        del copies
        return converted

    module._fakify_params_buffers = copy_or_convert
    try:
        yield
    finally:
        module._fakify_params_buffers = convert


def _copy_simple(fake_mode: FakeTensorMode, owner: nn.Module) -> list[Tensor]:
    """Return copies of the simple tensors of a module, which the mode then takes for these."""
    copies: list[Tensor] = []
    tensors = {id(t): t for t in [*owner.parameters(), *owner.buffers()]}.values()
    readers = Counter(storage_of(t) for t in tensors if type(t) is FakeTensor)
    for tensor in tensors:
        if _is_simple(tensor) and readers[storage_of(tensor)] == 1:
            copied = _copy(fake_mode, tensor)
            fake_mode.fake_tensor_converter.set_tensor_memo(tensor, copied)
            copies.append(copied)
    return copies


def _is_simple(tensor: Tensor) -> bool:
    """Return whether a tensor is a fake leaf that fills its memory, in the usual order."""
    return (
        type(tensor) is FakeTensor
        and tensor.layout is torch.strided
        and tensor.is_leaf
        and not tensor._is_view()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        and tensor.constant is None
        and tensor.real_tensor is None
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    )


def _copy(fake_mode: FakeTensorMode, tensor: Tensor) -> FakeTensor:
    # The stride of a dimension of size 1 may be any.
    memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    copied = FakeTensor(fake_mode, memory, tensor.device)
    copied.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        copied._is_param = True
    return copied
