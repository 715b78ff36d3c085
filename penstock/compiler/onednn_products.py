"""Products of float32 matrices by oneDNN on the CPU.

oneDNN reads its left factor row after row, and PyTorch copies a factor that is a transposed view,
as in the gradient of a weight. A kernel of our own makes that copy in a fourth of the time. The
right factor may be either way, but where it is stored row after row oneDNN sums over more than a
thousand numbers slowly: such a sum is made of bands, or the factor is transposed before
(`docs/decisions.md` has the figures).
"""

import torch
from torch import Tensor

_LONG_SUM = 1024
_BANDED_SUM = 8192  # sums that are made of bands of `_LONG_SUM`
_LEAST_ROWS = 768  # of a result, for which a copy of the right factor pays
_MOST_COPIED = 64 << 20  # bytes of a right factor that is copied


def linear(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `left @ right.T + bias`.

    **Arguments:** `left` [rows, inner] and `right` [columns, inner], float32 in host memory, which
    may be transposed views; `bias` [columns].
    """
    if _is_banded(left, right):
        return _banded(left, right, bias)
    if _is_copied(left, right):
        right = _row_major(right)
    return _linear(_row_major(left), right, bias)


def scratch_bytes(left: Tensor, right: Tensor) -> int:
    """Return the bytes of the copies that a product makes, and of the parts of its result."""
    if _is_banded(left, right):
        return 4 * left.shape[0] * (_LONG_SUM + right.shape[0])
    copied = left.numel() if _is_transposed(left) else 0
    return 4 * (copied + (right.numel() if _is_copied(left, right) else 0))


def _linear(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(left, right, bias, "none", [], "")


def _banded(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """Add products over bands of the inner dimension, in their order."""

    def part(begin: int, bias: Tensor | None) -> Tensor:
        band = slice(begin, begin + _LONG_SUM)
        return _linear(_row_major(left[:, band]), right[:, band], bias)

    total = part(0, bias)
    for begin in range(_LONG_SUM, left.shape[1], _LONG_SUM):
        total.add_(part(begin, None))
    return total


def _is_banded(left: Tensor, right: Tensor) -> bool:
    return left.shape[1] > _BANDED_SUM and _is_transposed(right)


def _is_copied(left: Tensor, right: Tensor) -> bool:
    """Return whether the right factor is copied for a float32 product."""
    rows, inner = left.shape
    is_small = 4 * right.numel() <= _MOST_COPIED
    return _is_transposed(right) and inner > _LONG_SUM and rows >= _LEAST_ROWS and is_small


def _is_transposed(matrix: Tensor) -> bool:
    """Return whether the columns of a matrix are contiguous and its rows are not."""
    rows, columns = matrix.shape
    return matrix.stride(0) == 1 and matrix.stride(1) >= rows > 1 and columns > 1


def _row_major(matrix: Tensor) -> Tensor:
    """Return a matrix with contiguous rows: itself, or a copy of a transposed view."""
    if not _is_transposed(matrix):
        return matrix
    from penstock.kernels.transposed_copy import copy_transposed  # loads a compiler

    made = torch.empty(matrix.shape)
    copy_transposed(matrix.detach().t().numpy(), made.view(-1).numpy())
    return made
