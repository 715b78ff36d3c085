"""Makes the fake parameters of an export without the general conversion.

An export converts every parameter and buffer of a module into its own fake mode. The conversion
describes views, storages and subclasses. Most parameters are contiguous leaves with a storage of
their own. These are copied directly, and the conversion finds the copies in its memo.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from penstock.compiler.tensors import contiguous_strides, storage_of


@contextmanager
def simple_copies() -> Iterator[None]:
    """Context of an export in which simple fake parameters and buffers are copied directly.

    A copy has the metadata and the place in the memo that the conversion would give it. All other
    tensors are converted. One thread at a time may use it, since it replaces a function of PyTorch.
    """
    from torch.export import _trace  # imports torch._dynamo, which takes seconds

    module: Any = _trace
    convert = module._fakify_params_buffers

    def copy_or_convert(fake_mode: FakeTensorMode, owner: nn.Module) -> Mapping[str, Tensor]:
        # The memo has weak references: the list keeps the copies until the conversion returns them.
        with torch._C.DisableTorchFunction(), torch.inference_mode(False), no_dispatch():
            copies = _copy_simple(fake_mode, owner)
        converted: Mapping[str, Tensor] = convert(fake_mode, owner)
        del copies
        return converted

    module._fakify_params_buffers = copy_or_convert
    try:
        yield
    finally:
        module._fakify_params_buffers = convert


def _copy_simple(fake_mode: FakeTensorMode, owner: nn.Module) -> list[FakeTensor]:
    """Copy the simple tensors of a module and add the copies to the memo of the conversion."""
    converter = fake_mode.fake_tensor_converter
    storage_memo = converter.meta_converter.storage_memo
    describer = converter.meta_converter.describer
    tensors = {id(t): t for t in [*owner.parameters(), *owner.buffers()]}.values()
    fakes = [t for t in tensors if type(t) is FakeTensor and t.layout is torch.strided]
    tensors_of_storage = Counter(map(storage_of, fakes))
    copies = []
    for tensor in fakes:
        storage = tensor.untyped_storage()
        number = describer.get_storage_id(storage)
        is_shared = number in storage_memo or tensors_of_storage[storage_of(tensor)] > 1
        if is_shared or not _is_simple(tensor):
            continue
        copied = _copy(fake_mode, tensor)
        converter.set_tensor_memo(tensor, copied)
        storage_memo[number] = copied.untyped_storage()  # for tensors that share it
        copies.append(copied)
    return copies


def _is_simple(tensor: FakeTensor) -> bool:
    """Return whether a strided tensor is a contiguous leaf that fills its storage, without anything
    that a copy lacks."""
    return (
        tensor.is_leaf
        and not tensor._is_view()
        and not tensor.is_inference()
        and tensor.constant is None
        and tensor.real_tensor is None
        and tensor.grad is None
        and getattr(tensor, "grad_dtype", tensor.dtype) == tensor.dtype
        and tensor.stride() == contiguous_strides(tensor.shape)
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    )


def _copy(fake_mode: FakeTensorMode, tensor: FakeTensor) -> FakeTensor:
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    copied = FakeTensor(fake_mode, memory, tensor.device)
    copied.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        copied._is_param = True
    return copied
