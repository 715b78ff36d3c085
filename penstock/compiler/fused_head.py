"""The last linear layer and the cross-entropy in one operator, in chunks of tokens.

The logits of a large vocabulary are never stored completely. The logits of a chunk of tokens are
computed, replaced in place by their own gradient, and used for the gradients of the hidden states
and of the weight. The next chunk then overwrites them. Losses are sums over tokens in float32.

Source of the method: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024, and
Hsu et al., Liger Kernel, 2024; here the chunks are large, since accumulating the gradient of the
weight reads and writes all of it once per chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from penstock.compiler.products import product
from penstock.kernels import cross_entropy as kernels

# Logits of a chunk, in bytes: large enough that adding to the weight's gradient once per chunk
# costs little beside the products (measured: benchmarks/streaming_tax.py).
CHUNK_BYTES = 128 << 20
_MIN_ROWS = 64


def chunk_rows(tokens: int, vocabulary: int, element_bytes: int) -> int:
    """Return the number of tokens per chunk: equal chunks of at most `CHUNK_BYTES`."""
    most = max(_MIN_ROWS, CHUNK_BYTES // (vocabulary * element_bytes))
    chunks = -(-tokens // most)
    return -(-tokens // chunks)


def loss_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    onednn: bool = False,
) -> Tensor:
    """Return the sum of the cross-entropies of `hidden @ weight.T + bias`, float32 [].

    **Arguments:** `hidden` [tokens, width]; `weight` [vocabulary, width]; `bias` [vocabulary] or
    None; `labels` int64 [tokens], entries equal to `ignore_index` are ignored; `onednn` selects the
    library for products (`products.py`).
    """
    losses = []
    for rows, logits in _logit_chunks(hidden, weight, bias, onednn):
        losses.append(_losses(logits, labels[rows], ignore_index))
    return torch.cat(losses).sum()


def loss_sum_and_predictions(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    onednn: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the result of `loss_sum`, bit-identical, and each token's most likely label, int64
    [tokens].

    Among equal logits the first is chosen, as in `torch.argmax`.
    """
    losses, predictions = [], []
    for rows, logits in _logit_chunks(hidden, weight, bias, onednn):
        losses.append(_losses(logits, labels[rows], ignore_index))
        predictions.append(_most_likely(logits))
    return torch.cat(losses).sum(), torch.cat(predictions)


def gradients(
    scale: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    with_weight: bool,
    onednn: bool = False,
) -> list[Tensor]:
    """Return the gradients of `scale * loss_sum` for hidden, weight and bias (if any)."""
    return loss_sum_and_gradients(
        scale, hidden, weight, bias, labels, ignore_index, with_weight, onednn
    )[1:]


def loss_sum_and_gradients(
    scale: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    with_weight: bool,
    onednn: bool = False,
) -> list[Tensor]:
    """Return the loss sum and, from the same pass over the logits, all its gradients times `scale`.

    A gradient has the type of its tensor; chunks are added in float32.
    """
    # On a GPU the number stays on the device: reading it would wait for all queued work.
    factor = float(scale) if scale.device.type == "cpu" else scale
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    grad_weight = torch.empty(0)
    grad_bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
    losses = []
    for number, (rows, logits) in enumerate(_logit_chunks(hidden, weight, bias, onednn)):
        losses.append(_losses_to_gradients(logits, labels[rows], ignore_index, factor))
        grad_hidden[rows] = product(logits, weight, onednn)
        if not with_weight:
            continue
        part = product(logits.t(), hidden[rows], onednn)
        # Chunks are added in float32 for every type, so that small contributions are not rounded
        # away.
        grad_weight = part if number == 0 else grad_weight.float().add_(part)
        if bias is not None:
            grad_bias += logits.sum(0, dtype=torch.float32)
    grads = [torch.cat(losses).sum(), grad_hidden]
    if with_weight:
        grads.append(grad_weight.to(weight.dtype))
        if bias is not None:
            grads.append(grad_bias.to(bias.dtype))
    return grads


def _logit_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, onednn: bool
) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows of this chunk, its logits [rows, vocabulary]); the caller may overwrite the
    logits."""
    tokens = hidden.shape[0]
    step = chunk_rows(tokens, weight.shape[0], hidden.element_size())
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        logits = product(hidden[rows], weight.t(), onednn)
        if bias is not None:
            logits += bias
        yield rows, logits
        del logits  # freed before the next chunk's logits are computed


def _losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Return each row's cross-entropy in float32, 0 where ignored."""
    if logits.device.type == "cpu":
        losses = kernels.cross_entropy(_bits(logits), labels.numpy(), ignore_index=ignore_index)
        return torch.from_numpy(losses)
    return torch.nn.functional.cross_entropy(
        logits.float(), labels, ignore_index=ignore_index, reduction="none"
    )


def _most_likely(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":
        return torch.from_numpy(kernels.most_likely(_bits(logits)))
    return logits.argmax(1)


def _losses_to_gradients(
    logits: Tensor, labels: Tensor, ignore_index: int, factor: float | Tensor
) -> Tensor:
    """Return each row's cross-entropy and overwrite `logits` with its gradient times `factor`."""
    if logits.device.type == "cpu":
        losses = kernels.cross_entropy_and_gradient(
            _bits(logits), labels.numpy(), ignore_index=ignore_index, scale=float(factor)
        )
        return torch.from_numpy(losses)
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


def _bits(logits: Tensor) -> np.ndarray:
    """View logits for the kernels: float32 as they are, bfloat16 as their bit patterns."""
    if logits.dtype == torch.bfloat16:
        return logits.view(torch.uint16).numpy()
    return logits.numpy()


def scratch_bytes(hidden: Tensor, weight: Tensor, gradients: bool) -> int:
    """Return the bytes that the operator allocates besides its results: logits, and sums in
    float32."""
    element = hidden.element_size()
    rows = chunk_rows(hidden.shape[0], weight.shape[0], element)
    logits = rows * weight.shape[0] * element
    if hidden.device.type != "cpu":
        logits += 2 * rows * weight.shape[0] * 4  # the float32 copies for the losses
    if not gradients or rows == hidden.shape[0]:
        return logits
    parts = element if weight.dtype == torch.float32 else 4 + element
    return logits + weight.numel() * parts
