"""Products of a matrix and one token on the CPU, as in incremental decoding (`decoding.py`).

Libraries of dense products are made for many tokens. For one, the kernel takes a third to
two thirds of the time of PyTorch's product (`benchmarks/generation.py`).
"""

import torch
from torch import Tensor

from penstock.compiler.tensors import elements_of

_LEAST_ELEMENTS = 1 << 16  # a smaller matrix is read too fast for the kernel to matter
_TYPES = (torch.float32, torch.bfloat16)


def linear(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `left @ right.T + bias`, summed in float32 and rounded once.

    **Arguments:** `left` [1, inner]; `right` [columns, inner], which may be a transposed view;
    `bias` [columns]. All are float32 or all are bfloat16, in host memory.

    Raises:
        ValueError: a factor has another type, or there are several tokens.
    """
    if left.shape[0] != 1 or left.dtype not in _TYPES or right.dtype != left.dtype:
        raise ValueError(
            "token_linear: expected one token and factors of one type, float32 or bfloat16, got "
            f"{left.dtype} {list(left.shape)} and {right.dtype} {list(right.shape)}"
        )
    from penstock.kernels.vector_products import multiply_columns, multiply_rows  # a compiler

    is_by_columns = right.t().is_contiguous() and not right.is_contiguous()
    multiply = multiply_columns if is_by_columns else multiply_rows
    matrix = right.t() if is_by_columns else right.contiguous()
    out = torch.empty(1, right.shape[0], dtype=torch.float32)
    of_bias = None if bias is None else elements_of(bias.float().contiguous())
    multiply(
        elements_of(matrix), elements_of(left.float().contiguous()), out.view(-1).numpy(), of_bias
    )
    return out.to(left.dtype)


def scratch_bytes(left: Tensor, right: Tensor, bias: Tensor | None = None) -> int:
    """Return the most bytes that a product allocates besides its result."""
    from penstock.kernels.vector_products import PARTS

    return 4 * ((PARTS + 3) * right.shape[0] + left.shape[1])


def has_kernel(left: Tensor, right: Tensor) -> bool:
    """Return whether the product `left @ right` is one for the kernel."""
    return (
        left.shape[0] == 1
        and left.device.type == "cpu"
        and left.dtype in _TYPES
        and right.numel() >= _LEAST_ELEMENTS
        and (right.is_contiguous() or right.t().is_contiguous())
    )
