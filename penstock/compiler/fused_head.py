"""The last linear layer and the cross-entropy in one operator, in chunks of tokens.

The logits of a large vocabulary are never stored completely. The logits of a chunk of tokens are
computed, replaced in place by their own gradient, and used for the gradients of the hidden states
and of the weight. The next chunk then overwrites them. Losses are sums over tokens in float32.

Source of the method: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024, and
Hsu et al., Liger Kernel, 2024; here the chunks are large, since accumulating the gradient of the
weight reads and writes all of it once per chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.compiler import device_losses, onednn_products
from penstock.compiler.matmul_backend import ALIGNED_COLUMNS, product
from penstock.compiler.product_libraries import uses_onednn, widens

# Logits of a chunk, in bytes: large enough that adding to the weight's gradient once per chunk
# costs little beside the products (measured: benchmarks/streaming_tax.py).
CHUNK_BYTES = 128 << 20
_MIN_ROWS = 64
_BAND_LABELS = 4096  # of a weight's gradient that is computed and added at once, on the CPU
_BAND_ELEMENTS = 1 << 18  # of a part that is added at once to a sum of another type
_LEAST_ALIGNED = 4096  # vocabulary from which on the padding is small beside the logits


def _chunk_count(hidden: Tensor, vocabulary: int) -> int:
    """Return the number of chunks of a call."""
    tokens = hidden.shape[0]
    return -(-tokens // chunk_rows(tokens, vocabulary, hidden.element_size()))


def chunk_rows(tokens: int, vocabulary: int, element_bytes: int) -> int:
    """Return the number of tokens per chunk: equal chunks of at most `CHUNK_BYTES`."""
    most = max(_MIN_ROWS, CHUNK_BYTES // (vocabulary * element_bytes))
    chunks = -(-tokens // most)
    return -(-tokens // chunks)


def _aligned(vocabulary: int) -> int:
    """Return the number of logits from one row to the next where rows are aligned."""
    if vocabulary < _LEAST_ALIGNED:
        return vocabulary
    return -(-vocabulary // ALIGNED_COLUMNS) * ALIGNED_COLUMNS


GradientPart = tuple[slice, Tensor]
"""Rows of the gradient of a weight: where they are in it, and their values."""
ALL_ROWS = slice(None)


class HeadWeight(Protocol):
    """The weight of a head and its products; `step` is the number of rows of a full chunk.

    Attributes:
        vocabulary: number of labels.
        gradient_dtype: type of its gradient.
    """

    vocabulary: int
    gradient_dtype: torch.dtype

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        """Return the logits [rows, vocabulary] of hidden states, without bias; rows may be
        padded."""
        ...

    def hidden_gradient(self, logits: Tensor, step: int) -> Tensor:
        """Return the gradient of the hidden states [rows, width] from that of the logits."""
        ...

    def weight_gradients(self, logits: Tensor, hidden: Tensor, step: int) -> Iterator[GradientPart]:
        """Yield the gradient of the weight from that of the logits, in parts."""
        ...


class _DenseWeight:
    """A dense weight [vocabulary, width]; `products` are those of `product_libraries.py`.

    On a device, cuBLAS has fast kernels only for sizes that 16 bytes divide: the weight gets rows
    of zeros at its end, and the logits columns of zeros, which no loss reads and no gradient
    changes.

    On the CPU the rows of logits are aligned where the library writes them in place: MKL is slow to
    write an odd number of columns of float32, and oneDNN to read one of bfloat16 for the gradient
    of the weight (`docs/decisions.md`).
    """

    def __init__(self, weight: Tensor, products: str) -> None:
        self.vocabulary, self.gradient_dtype = weight.shape[0], weight.dtype
        self._products = products
        self._width = _aligned(self.vocabulary)
        self._is_padded = _is_padded(weight)
        self._has_aligned_rows = _has_aligned_rows(weight, products)
        self._weight = weight
        if self._is_padded:
            self._weight = weight.new_zeros((self._width, weight.shape[1]))
            self._weight[: self.vocabulary] = weight

    def logits(self, hidden: Tensor, step: int) -> Tensor:
        if self._has_aligned_rows:
            whole = hidden.new_empty((hidden.shape[0], self._width))
            whole[:, self.vocabulary :] = 0
            return torch.mm(hidden, self._weight.t(), out=whole[:, : self.vocabulary])
        return product(hidden, self._weight.t(), self._products)[:, : self.vocabulary]

    def hidden_gradient(self, logits: Tensor, step: int) -> Tensor:
        whole = self._whole(logits) if self._is_padded else logits
        return product(whole, self._weight, self._products)

    def weight_gradients(self, logits: Tensor, hidden: Tensor, step: int) -> Iterator[GradientPart]:
        if hidden.device.type != "cpu":
            whole = self._whole(logits) if self._is_padded else logits
            part = product(whole.t(), hidden, self._products)[: self.vocabulary]
            yield ALL_ROWS, part
            return
        logits = self._whole(logits) if self._has_aligned_rows else logits
        for begin in range(0, self.vocabulary, _BAND_LABELS):
            part = product(logits[:, begin : begin + _BAND_LABELS].t(), hidden, self._products)
            end = min(begin + _BAND_LABELS, self.vocabulary)
            is_all = end - begin == self.vocabulary
            yield ALL_ROWS if is_all else slice(begin, end), part[: end - begin]

    def _whole(self, logits: Tensor) -> Tensor:
        """Return logits with the columns of the padding, which are zeros."""
        return logits.as_strided((logits.shape[0], self._width), (self._width, 1))


def _is_padded(weight: Tensor) -> bool:
    """Return whether a weight gets rows of zeros for its products."""
    return weight.device.type != "cpu" and _aligned(weight.shape[0]) != weight.shape[0]


def _has_aligned_rows(weight: Tensor, products: str) -> bool:
    """Return whether the rows of logits are aligned for a weight as it is, on the CPU."""
    if weight.device.type != "cpu" or _is_padded(weight):
        return False
    is_direct = weight.dtype == torch.bfloat16 and not widens(products)
    return is_direct or (weight.dtype == torch.float32 and not uses_onednn(products))


@dataclass(frozen=True)
class Head:
    """One call of a head: the arguments of `loss_sum`, with any kind of weight."""

    hidden: Tensor
    weight: HeadWeight
    bias: Tensor | None
    labels: Tensor
    ignore_index: int

    def loss_sum(self) -> Tensor:
        """Return the sum of the losses, float32 []."""
        losses = []
        for rows in self._chunks():
            losses.append(_losses(self._logits(rows), self.labels[rows], self.ignore_index))
        return torch.cat(losses).sum()

    def loss_sum_and_predictions(self) -> tuple[Tensor, Tensor]:
        """Return also each token's most likely label, int64 [tokens]."""
        losses, predictions = [], []
        for rows in self._chunks():
            logits = self._logits(rows)
            losses.append(_losses(logits, self.labels[rows], self.ignore_index))
            predictions.append(_most_likely(logits))
            del logits  # freed before the next chunk's logits are computed
        return torch.cat(losses).sum(), torch.cat(predictions)

    def loss_sum_and_gradients(self, scale: Tensor, with_weight: bool) -> list[Tensor]:
        """Return the sum of the losses and, times `scale`, the gradients of hidden, weight and bias
        (if any)."""
        hidden, weight, bias = self.hidden, self.weight, self.bias
        # On a GPU the number stays on the device: reading it would wait for all queued work.
        factor = float(scale) if scale.device.type == "cpu" else scale
        grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        grad_weight: Tensor | None = None
        grad_bias = torch.zeros(weight.vocabulary, dtype=torch.float32, device=hidden.device)
        losses = []
        chunks = _chunk_count(hidden, weight.vocabulary)
        for number, rows in enumerate(self._chunks()):
            logits, labels = self._logits(rows), self.labels[rows]
            losses.append(_losses_to_gradients(logits, labels, self.ignore_index, factor))
            grad_hidden[rows] = weight.hidden_gradient(logits, self._step)
            if not with_weight:
                del logits
                continue
            # Chunks are added in float32 for every type, so that small contributions are not
            # rounded away. An addition computes in float32 anyway: two chunks need no copies.
            if number == 1 and chunks > 2:
                assert grad_weight is not None
                grad_weight = grad_weight.float()
            grad_weight = _added(
                grad_weight,
                weight.weight_gradients(logits, hidden[rows], self._step),
                weight.vocabulary,
            )
            if bias is not None:
                grad_bias += logits.sum(0, dtype=torch.float32)
            del logits  # freed before the next chunk's logits are computed
        grads = [torch.cat(losses).sum(), grad_hidden]
        if grad_weight is not None:
            grads.append(grad_weight.to(weight.gradient_dtype))
            if bias is not None:
                grads.append(grad_bias.to(bias.dtype))
        return grads

    @property
    def _step(self) -> int:
        hidden = self.hidden
        return chunk_rows(hidden.shape[0], self.weight.vocabulary, hidden.element_size())

    def _chunks(self) -> Iterator[slice]:
        """Yield the rows of each chunk."""
        tokens, step = self.hidden.shape[0], self._step
        for start in range(0, tokens, step):
            yield slice(start, min(start + step, tokens))

    def _logits(self, rows: slice) -> Tensor:
        """Return the logits of a chunk [rows, vocabulary], which the caller may overwrite."""
        logits = self.weight.logits(self.hidden[rows], self._step)
        if self.bias is not None:
            logits += self.bias
        return logits


def loss_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    products: str = "torch",
) -> Tensor:
    """Return the sum of the cross-entropies of `hidden @ weight.T + bias`, float32 [].

    **Arguments:** `hidden` [tokens, width]; `weight` [vocabulary, width]; `bias` [vocabulary] or
    None; `labels` int64 [tokens], entries equal to `ignore_index` are ignored; `products` says who
    multiplies (`product_libraries.py`).
    """
    return Head(hidden, _DenseWeight(weight, products), bias, labels, ignore_index).loss_sum()


def loss_sum_and_predictions(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    products: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Return the result of `loss_sum`, bit-identical, and each token's most likely label, int64
    [tokens].

    Among equal logits the first is chosen, as in `torch.argmax`.
    """
    head = Head(hidden, _DenseWeight(weight, products), bias, labels, ignore_index)
    return head.loss_sum_and_predictions()


def gradients(
    scale: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    with_weight: bool,
    products: str = "torch",
) -> list[Tensor]:
    """Return the gradients of `scale * loss_sum` for hidden, weight and bias (if any)."""
    return loss_sum_and_gradients(
        scale, hidden, weight, bias, labels, ignore_index, with_weight, products
    )[1:]


def loss_sum_and_gradients(
    scale: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    with_weight: bool,
    products: str = "torch",
) -> list[Tensor]:
    """Return the loss sum and, from the same pass over the logits, all its gradients times `scale`.

    A gradient has the type of its tensor; chunks are added in float32.
    """
    head = Head(hidden, _DenseWeight(weight, products), bias, labels, ignore_index)
    return head.loss_sum_and_gradients(scale, with_weight)


def _added(total: Tensor | None, parts: Iterator[GradientPart], vocabulary: int) -> Tensor:
    """Add parts to `total`, which is overwritten, and return the sum; without a total, the parts
    are the sum."""
    is_first = total is None
    for rows, part in parts:
        if total is None:
            if rows == ALL_ROWS:
                return part
            total = part.new_empty((vocabulary, *part.shape[1:]))
        if is_first:
            total[rows] = part
        else:
            _add(total[rows], part)
    assert total is not None
    return total


def _add(total: Tensor, part: Tensor) -> None:
    """Add rows of a gradient of a weight in place."""
    if total.device.type != "cpu" or total.dtype == part.dtype:
        total.add_(part)
        return
    # PyTorch widens the whole operand before it adds: a band of it stays in cache.
    step = max(1, _BAND_ELEMENTS // part.shape[1])
    for begin in range(0, part.shape[0], step):
        total[begin : begin + step].add_(part[begin : begin + step])


def _losses(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Return each row's cross-entropy in float32, 0 where ignored."""
    if logits.device.type == "cpu":
        from penstock.kernels import cross_entropy as kernels  # loads a compiler

        losses = kernels.cross_entropy(_bits(logits), labels.numpy(), ignore_index=ignore_index)
        return torch.from_numpy(losses)
    return device_losses.cross_entropy(logits, labels, ignore_index)


def _most_likely(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":
        from penstock.kernels import cross_entropy as kernels

        return torch.from_numpy(kernels.most_likely(_bits(logits)))
    return logits.argmax(1)


def _losses_to_gradients(
    logits: Tensor, labels: Tensor, ignore_index: int, factor: float | Tensor
) -> Tensor:
    """Return each row's cross-entropy and overwrite `logits` with its gradient times `factor`."""
    if logits.device.type == "cpu":
        from penstock.kernels import cross_entropy as kernels

        losses = kernels.cross_entropy_and_gradient(
            _bits(logits), labels.numpy(), ignore_index=ignore_index, scale=float(factor)
        )
        return torch.from_numpy(losses)
    assert isinstance(factor, Tensor)
    return device_losses.cross_entropy_and_gradient(logits, labels, ignore_index, factor)


def _bits(logits: Tensor) -> np.ndarray:
    """View logits for the kernels: float32 as they are, bfloat16 as their bit patterns."""
    if logits.dtype == torch.bfloat16:
        return logits.view(torch.uint16).numpy()
    return logits.numpy()


def scratch_bytes(hidden: Tensor, weight: Tensor, gradients: bool, products: str) -> int:
    """Return the bytes that the operator allocates besides its results: logits, parts and sums of
    the weight's gradient, and a padded weight with its gradient's padding."""
    element, chunks = hidden.element_size(), _chunk_count(hidden, weight.shape[0])
    own = chunk_bytes(hidden, weight.shape[0])
    padding = (_aligned(weight.shape[0]) - weight.shape[0]) * weight.shape[1] * element
    if _is_padded(weight):
        own += weight.nbytes + 2 * padding
    if not gradients:
        return own
    has_sum = chunks > 2 and weight.dtype != torch.float32
    if weight.device.type == "cpu":
        own += _gradient_bytes(hidden, weight, products)
        # The parts are freed before the sum is rounded to the result.
        own = max(0, own - weight.numel() * element) if has_sum else own
    elif chunks > 1:
        own += weight.numel() * element
    return own + weight.numel() * 4 if has_sum else own


def _gradient_bytes(hidden: Tensor, weight: Tensor, products: str) -> int:
    """Return the bytes of the parts of the weight's gradient that exist at the same time, besides
    its sum, and of what oneDNN's products allocate."""
    vocabulary, width = weight.shape
    labels = min(_BAND_LABELS, vocabulary)
    parts = min(2 * labels, vocabulary)
    if labels == vocabulary and _chunk_count(hidden, vocabulary) == 1:
        parts = 0  # the only part is the result
    own = parts * width * hidden.element_size()
    if hidden.dtype != torch.float32 or not uses_onednn(products):
        return own
    step = chunk_rows(hidden.shape[0], vocabulary, hidden.element_size())
    sizes = {min(step, hidden.shape[0]), hidden.shape[0] % step or step}
    return max(_product_bytes(rows, labels, weight.shape, own) for rows in sizes)


def _product_bytes(rows: int, labels: int, shape: torch.Size, parts: int) -> int:
    """Return the larger of what oneDNN allocates for the gradient of hidden states, and for that of
    a band of the weight beside its parts."""
    vocabulary, width = shape
    logits, states, matrix = (
        torch.empty(size, dtype=torch.float32, device="meta")
        for size in ((rows, vocabulary), (rows, width), (vocabulary, width))
    )
    of_weight = parts + onednn_products.scratch_bytes(logits[:, :labels].t(), states.t())
    return max(of_weight, onednn_products.scratch_bytes(logits, matrix.t()))


def chunk_bytes(hidden: Tensor, vocabulary: int) -> int:
    """Return the bytes of a chunk's logits, and of copies for its losses."""
    rows = chunk_rows(hidden.shape[0], vocabulary, hidden.element_size())
    if hidden.device.type != "cpu":
        width = 2 * _aligned(vocabulary)  # log_softmax copies rows that are apart
        return rows * (width * hidden.element_size() + vocabulary * 2 * 4)
    return rows * _aligned(vocabulary) * hidden.element_size()
