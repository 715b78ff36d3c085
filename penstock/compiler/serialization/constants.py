"""The values of a program's constants: their bytes, one after the other, after the JSON."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from penstock.compiler.serialization import fields
from penstock.compiler.serialization.fields import MalformedError, NotSerializableError
from penstock.compiler.serialization.kinds import read_spec, write_spec
from penstock.program import TensorSpec, nbytes

MOST_BYTES = 128 << 20
"""Programs with more bytes of constants have no written form."""


def write_constants(
    constants: Mapping[str, torch.Tensor],
) -> tuple[list[Any], list[bytes]]:
    """Return constants as JSON, and the bytes of their values. Fake tensors have no values.

    Raises:
        NotSerializableError: the constants are too large, or of an unknown layout or device.
    """
    lines, values = [], []
    if sum(tensor.nbytes for tensor in constants.values() if not _is_fake(tensor)) > MOST_BYTES:
        raise NotSerializableError(f"the constants have more than {MOST_BYTES:,} bytes")
    for name, tensor in constants.items():
        spec = write_spec(TensorSpec(tuple(tensor.shape), tensor.dtype))
        if tensor.layout != torch.strided or tensor.device.type not in fields.DEVICES:
            raise NotSerializableError(f"constant {name} is {tensor.layout} on {tensor.device}")
        is_fake = _is_fake(tensor)
        if not is_fake and not tensor.is_contiguous():
            raise NotSerializableError(f"constant {name} is not contiguous")
        lines.append([name, spec, tensor.device.type, is_fake])
        if not is_fake:
            flat = tensor.detach().cpu().reshape(-1).view(torch.uint8)
            values.append(flat.numpy().tobytes())
    return lines, values


def read_constants(value: Any, data: memoryview) -> dict[str, torch.Tensor]:
    """Return constants with their values from `data`.

    Raises:
        MalformedError: they are not constants, or `data` has another length.
    """
    found: dict[str, torch.Tensor] = {}
    begin = 0
    mode: FakeTensorMode | None = None  # its constructor imports torch._dynamo, which takes seconds
    for line in fields.items(value):
        name, spec, device, is_fake = fields.items(line, 4)
        tensor = read_spec(spec)
        kind = fields.device(device)
        if fields.flag(is_fake):
            mode = mode or FakeTensorMode()
            with mode:
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device=kind)
        else:
            size = nbytes(tensor.shape, tensor.dtype)
            if size > len(data) - begin:
                raise MalformedError(f"constant {name!r:.80} has {size} bytes, too many")
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            made.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(
                data, np.uint8, size, begin
            )
            begin += size
            made = made.to(kind)
        found[fields.text(name)] = made
    if begin != len(data):
        raise MalformedError(f"expected {begin} bytes of constants, got {len(data)}")
    return found


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)
