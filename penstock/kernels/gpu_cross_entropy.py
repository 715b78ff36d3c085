"""Cross-entropy and its gradient on a GPU: one pass over the logits for each row's sum, one more
for the gradient, which replaces them.

PyTorch's operators would write each logit's logarithm and probability in float32: eight passes over
memory instead of three. The kernel is written in Triton, which PyTorch's builds for CUDA include;
import this module only where Triton is installed.

Source of the method: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 4096, 8
_LEAST = -3.4e38  # below each logit that is finite; the difference to itself is 0


@triton.jit
def _cross_entropy(
    logits,
    labels,
    losses,
    factor,
    row_stride,
    columns,
    ignored,
    least: tl.constexpr,
    with_gradient: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * row_stride
    label = tl.load(labels + row)
    places = tl.arange(0, block)
    # A maximum that drops a NaN is no fault: the sum keeps it.
    largest = tl.full([block], least, tl.float32)
    total = tl.zeros([block], tl.float32)
    for begin in range(0, columns, block):
        there = begin + places < columns
        x = tl.load(values + begin + places, mask=there, other=float("-inf")).to(tl.float32)
        before = largest
        largest = tl.maximum(before, x)
        total = total * tl.exp(before - largest) + tl.exp(x - largest)
    top = tl.max(largest, 0)
    logarithm = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    is_kept = label != ignored
    is_label = (label >= 0) & (label < columns)
    chosen = tl.load(values + label, mask=is_label, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(is_kept, logarithm - chosen, 0.0))
    if with_gradient:
        scale = tl.load(factor)
        for begin in range(0, columns, block):
            column = begin + places
            there = column < columns
            x = tl.load(values + column, mask=there, other=0.0).to(tl.float32)
            gradient = (tl.exp(x - logarithm) - tl.where(column == label, 1.0, 0.0)) * scale
            gradient = tl.where(is_kept, gradient, 0.0)
            tl.store(values + column, gradient.to(logits.dtype.element_ty), mask=there)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return each row's cross-entropy, float32 [rows], 0 where the label is `ignore_index`.

    Args:
        logits: bfloat16 or float32 [rows, columns] on a GPU; elements of a row are adjacent.
        labels: int64 [rows]; the loss of a label that is no column is NaN.
    """
    return _run(logits, labels, ignore_index, None)


def cross_entropy_and_gradient(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, factor: torch.Tensor
) -> torch.Tensor:
    """Return each row's cross-entropy, and replace `logits` by its gradient times `factor`, a
    float32 number on the same GPU; otherwise as `cross_entropy`."""
    return _run(logits, labels, ignore_index, factor)


def _run(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, factor: torch.Tensor | None
) -> torch.Tensor:
    rows, columns = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"logits: expected adjacent elements of rows, got {logits.stride()}")
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    run: Any = _cross_entropy[(rows,)]
    with torch.cuda.device(logits.device):
        run(
            logits,
            labels.contiguous(),
            losses,
            losses if factor is None else factor,
            logits.stride(0),
            columns,
            ignore_index,
            _LEAST,
            factor is not None,
            _BLOCK,
            num_warps=_WARPS,
        )
    return losses
