"""Losses of logits on a device other than the processor, and their gradients.

A kernel of Penstock's own computes them where Triton is installed and works; otherwise PyTorch's
operators do.
"""

import functools
import importlib.util
import warnings

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Return each row's cross-entropy in float32, 0 where ignored."""
    if _has_kernel(logits.device):
        from penstock.kernels import gpu_cross_entropy

        return gpu_cross_entropy.cross_entropy(logits, labels, ignore_index)
    return torch.nn.functional.cross_entropy(
        logits.float(), labels, ignore_index=ignore_index, reduction="none"
    )


def cross_entropy_and_gradient(
    logits: Tensor, labels: Tensor, ignore_index: int, factor: Tensor
) -> Tensor:
    """Return each row's cross-entropy and overwrite `logits` with its gradient times `factor`."""
    if _has_kernel(logits.device):
        from penstock.kernels import gpu_cross_entropy

        return gpu_cross_entropy.cross_entropy_and_gradient(
            logits, labels, ignore_index, factor.float()
        )
    return _by_operators(logits, labels, ignore_index, factor)


def _by_operators(logits: Tensor, labels: Tensor, ignore_index: int, factor: Tensor) -> Tensor:
    logarithms = torch.log_softmax(logits, dim=1, dtype=torch.float32)
    row_losses = torch.nn.functional.nll_loss(
        logarithms, labels, ignore_index=ignore_index, reduction="none"
    )
    probabilities = logarithms.exp_()
    kept = labels != ignore_index
    rows = torch.arange(len(labels), device=labels.device)
    probabilities[rows, labels.where(kept, 0)] -= 1.0
    logits.copy_(probabilities.mul_((kept * factor)[:, None]))
    return row_losses


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    """Return whether the kernel can be compiled for a device; a reason why not is a warning."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    from penstock.kernels import gpu_cross_entropy

    logits = torch.zeros((1, 1), device=device)
    try:
        gpu_cross_entropy.cross_entropy(logits, torch.zeros(1, dtype=torch.int64, device=device), 1)
    except Exception as error:  # Triton has no common class of errors; it also needs a C compiler
        warnings.warn(
            f"the loss is computed by several operators, since Triton does not work here: {error}",
            stacklevel=2,
        )
        return False
    return True
