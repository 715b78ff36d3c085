"""Products of float32 matrices by oneDNN on the CPU.

oneDNN reads its left factor row after row, and PyTorch copies a factor that is a transposed view,
as in the gradient of a weight. A kernel of our own makes that copy in less than half of the time.

The right factor is `[columns, inner]` in memory, or a transposed view of `[inner, columns]`. With
such a view oneDNN is slow above `_LONG_SUM` inner elements for most widths. The view is then
copied, if the result has enough rows and the copy is not too large; above `_BANDED_SUM` elements
the product is a sum over bands instead. A right factor with gaps between its rows, such as a part
of a larger tensor, is always copied: oneDNN has only slow loops for it, and none for rows that
overlap. `docs/decisions.md` has the figures.
"""

import torch
from torch import Tensor

_LONG_SUM = 1024
_BANDED_SUM = 8192  # sums that are made of bands of `_LONG_SUM`
_LEAST_ROWS = 768  # of a result, for which a copy of the right factor pays
_MOST_COPIED = 64 << 20  # bytes of a transposed view that is copied


def linear(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `left @ right.T + bias`.

    **Arguments:** `left` [rows, inner] and `right` [columns, inner], float32 in host memory, which
    may be transposed views; `bias` [columns].

    Raises:
        ValueError: a factor has another type.
    """
    for factor in (left, right):
        if factor.dtype != torch.float32 or factor.device.type != "cpu":
            raise ValueError(
                "onednn_linear: expected float32 in host memory, "
                f"got {factor.dtype} on {factor.device}"
            )
    if _is_banded(left, right):
        return _banded(left, right, bias)
    return _linear(_row_major(left), _row_major(right) if _is_copied(left, right) else right, bias)


def scratch_bytes(left: Tensor, right: Tensor, bias: Tensor | None = None) -> int:
    """Return the bytes of the copies that a product makes, and of the parts of its result."""
    rows, columns = left.shape[0], right.shape[0]
    if _is_banded(left, right):
        copied = 0 if _is_dense(right) else columns * _LONG_SUM
        return 4 * (rows * (_LONG_SUM + columns) + copied)
    copied = 0 if left.is_contiguous() else left.numel()
    return 4 * (copied + (right.numel() if _is_copied(left, right) else 0))


def _linear(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(left, right, bias, "none", [], "")


def _banded(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """Add products over bands of the inner dimension, in their order."""

    def part(begin: int, bias: Tensor | None) -> Tensor:
        band = slice(begin, begin + _LONG_SUM)
        of_right = right[:, band] if _is_dense(right) else _row_major(right[:, band])
        return _linear(_row_major(left[:, band]), of_right, bias)

    total = part(0, bias)
    for begin in range(_LONG_SUM, left.shape[1], _LONG_SUM):
        total.add_(part(begin, None))
    return total


def _is_banded(left: Tensor, right: Tensor) -> bool:
    """Return whether the product is a sum over bands."""
    return left.shape[1] > _BANDED_SUM and _is_transposed(right)


def _is_copied(left: Tensor, right: Tensor) -> bool:
    """Return whether the right factor of a product that is not banded is copied."""
    if not _is_dense(right):
        return True
    rows, inner = left.shape
    is_small = 4 * right.numel() <= _MOST_COPIED
    return _is_transposed(right) and inner > _LONG_SUM and rows >= _LEAST_ROWS and is_small


def _is_dense(matrix: Tensor) -> bool:
    """Return whether a matrix or its transposed view is contiguous: oneDNN has kernels for these
    two forms."""
    return matrix.is_contiguous() or matrix.t().is_contiguous()


def _is_transposed(matrix: Tensor) -> bool:
    """Return whether the columns of a matrix are contiguous and its rows are not."""
    rows, columns = matrix.shape
    return matrix.stride(0) == 1 and matrix.stride(1) >= rows > 1 and columns > 1


def _row_major(matrix: Tensor) -> Tensor:
    """Return a contiguous matrix: itself, or a copy, of a transposed view by our own kernel."""
    if not _is_transposed(matrix):
        return matrix.contiguous()
    from penstock.kernels.transposed_copy import copy_transposed  # loads a compiler

    made = torch.empty(matrix.shape, dtype=torch.float32)
    copy_transposed(matrix.detach().t().numpy(), made.view(-1).numpy())
    return made
