"""Softmax cross-entropy on a chunk of logits; the gradient overwrites the logits.

A row of a large vocabulary (50257 float32: 200 kB) stays in a core's second-level cache during the
passes for its maximum, its sum of exponentials and its gradient, so each logit crosses the memory
bus once in each direction. Rows are independent and each is summed in one fixed order: the result
does not depend on the number of threads.
"""

import numpy as np
from numba import prange

from penstock.errors import DataError
from penstock.kernels.arguments import flat_rows, require_flat, require_rows
from penstock.kernels.compilation import inlined, kernel
from penstock.kernels.exponential import exponential
from penstock.kernels.gradients import load_gradient, store_gradient
from penstock.kernels.vectors import (
    LANES,
    every_lane,
    first_lanes,
    greatest,
    greatest_lane,
    select,
    splat,
    sum_lanes,
    widened,
)

_RUN = 64 * LANES  # exponentials added in float32 before they are added to a float64 sum
_LOWEST = np.float32(-np.inf)


@inlined
def _row_maximum(logits, start, whole, end):
    # Two registers, since each maximum depends on the previous one.
    first = splat(_LOWEST)
    second = splat(_LOWEST)
    for i in range(start, whole, 2 * LANES):
        first = greatest(first, load_gradient(logits, i, every_lane()))
        second = greatest(second, load_gradient(logits, i + LANES, every_lane()))
    for i in range(whole, end, LANES):
        lanes = first_lanes(end - i)
        first = greatest(first, select(lanes, load_gradient(logits, i, lanes), splat(_LOWEST)))
    return greatest_lane(greatest(first, second))


@inlined
def _shifted(logits, i, maximum, lanes):
    """Return exp(logit - maximum); 0 in masked-off lanes."""
    value = exponential(load_gradient(logits, i, lanes) - splat(maximum))
    return select(lanes, value, splat(np.float32(0)))


@inlined
def _row_sum(logits, start, whole, end, maximum):
    total = splat(0.0)
    for run in range(start, whole, _RUN):
        first = splat(np.float32(0))
        second = splat(np.float32(0))
        for i in range(run, min(run + _RUN, whole), 2 * LANES):
            first += _shifted(logits, i, maximum, every_lane())
            second += _shifted(logits, i + LANES, maximum, every_lane())
        total += widened(first + second)
    for i in range(whole, end, LANES):
        total += widened(_shifted(logits, i, maximum, first_lanes(end - i)))
    return sum_lanes(total)


@inlined
def _row_gradient(logits, start, whole, end, maximum, factor):
    for i in range(start, whole, 2 * LANES):
        for j in range(i, i + 2 * LANES, LANES):
            value = _shifted(logits, j, maximum, every_lane()) * splat(factor)
            store_gradient(logits, j, value, every_lane())
    for i in range(whole, end, LANES):
        lanes = first_lanes(end - i)
        store_gradient(logits, i, _shifted(logits, i, maximum, lanes) * splat(factor), lanes)


@inlined
def _fill_zeros(logits, start, end):
    for i in range(start, end, LANES):
        store_gradient(logits, i, splat(np.float32(0)), first_lanes(end - i))


@inlined
def _first_place(logits, start, end, wanted):
    """Return the first index in a row with this value, -1 if there is none."""
    for i in range(start, end, LANES):
        lanes = first_lanes(end - i)
        here = select(lanes, load_gradient(logits, i, lanes), splat(_LOWEST))
        if greatest_lane(here) == wanted:
            for j in range(i, min(i + LANES, end)):
                if _value_at(logits, j) == wanted:
                    return j - start
    return -1


@inlined
def _value_at(logits, i):
    return greatest_lane(
        select(first_lanes(1), load_gradient(logits, i, first_lanes(1)), splat(_LOWEST))
    )


@kernel
def _loss(logits, stride, width, labels, ignored, losses):
    for row in prange(labels.size):
        label = labels[row]
        if label == ignored:
            losses[row] = np.float32(0)
        else:
            start = row * stride
            end = start + width
            whole = end - width % (2 * LANES)
            maximum = _row_maximum(logits, start, whole, end)
            total = _row_sum(logits, start, whole, end, maximum)
            chosen = np.float64(_value_at(logits, start + label))
            losses[row] = np.float32(np.log(total) + (np.float64(maximum) - chosen))


@kernel
def _loss_and_gradient(logits, stride, width, labels, ignored, scale, losses):
    for row in prange(labels.size):
        label = labels[row]
        start = row * stride
        end = start + width
        if label == ignored:
            losses[row] = np.float32(0)
            _fill_zeros(logits, start, end)
        else:
            whole = end - width % (2 * LANES)
            maximum = _row_maximum(logits, start, whole, end)
            total = _row_sum(logits, start, whole, end, maximum)
            chosen = np.float64(_value_at(logits, start + label))
            losses[row] = np.float32(np.log(total) + (np.float64(maximum) - chosen))
            _row_gradient(logits, start, whole, end, maximum, np.float32(np.float64(scale) / total))
            # At the label: scale x (p - 1), in float64 since p may be close to 1.
            probability = np.exp(chosen - np.float64(maximum)) / total
            at_label = np.float32((probability - 1.0) * np.float64(scale))
            store_gradient(logits, start + label, splat(at_label), first_lanes(1))


@kernel
def _prediction(logits, stride, width, predictions):
    for row in prange(predictions.size):
        start = row * stride
        end = start + width
        whole = end - width % (2 * LANES)
        maximum = _row_maximum(logits, start, whole, end)
        predictions[row] = _first_place(logits, start, end, maximum)


def _check(logits: np.ndarray, labels: np.ndarray, ignore_index: int, write: bool) -> None:
    dtype = np.uint16 if logits.dtype == np.uint16 else np.float32
    require_rows("logits", logits, dtype, write=write)
    require_flat("labels", labels, logits.shape[0], np.int64)
    wrong = ((labels < 0) | (labels >= logits.shape[1])) & (labels != ignore_index)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"label {labels[row]} in row {row}: expected 0 to {logits.shape[1] - 1} or "
            f"{ignore_index} to ignore the row; "
            "check that the data was built with the model's tokenizer"
        )


def cross_entropy(logits: np.ndarray, labels: np.ndarray, *, ignore_index: int) -> np.ndarray:
    """Return the loss of each row: `logsumexp(logits) - logits[label]`.

    Args:
        logits: `[rows, vocabulary]`, float32 or bfloat16 patterns (uint16), unchanged; rows may be
            padded.
        labels: int64 `[rows]`.
        ignore_index: the label of ignored rows; their loss is 0.

    Returns:
        float32 `[rows]`, computed with float64 sums; NaN where a logit is NaN or +infinity.

    Raises:
        DataError: a label is outside the vocabulary.
        ValueError: an array has another type, shape or layout.
    """
    _check(logits, labels, ignore_index, write=False)
    losses = np.empty(labels.size, np.float32)
    _loss(*flat_rows(logits), logits.shape[1], labels, ignore_index, losses)
    return losses


def most_likely(logits: np.ndarray) -> np.ndarray:
    """Return the index of the greatest logit of each row, the first of equal logits.

    Args:
        logits: `[rows, vocabulary]`, float32 or bfloat16 patterns (uint16), unchanged; rows may be
            padded.

    Returns:
        int64 `[rows]`; for a row with a NaN, -1 or any index.

    Raises:
        ValueError: the array has another type, shape or layout.
    """
    dtype = np.uint16 if logits.dtype == np.uint16 else np.float32
    require_rows("logits", logits, dtype)
    predictions = np.empty(logits.shape[0], np.int64)
    _prediction(*flat_rows(logits), logits.shape[1], predictions)
    return predictions


def cross_entropy_and_gradient(
    logits: np.ndarray, labels: np.ndarray, *, ignore_index: int, scale: float
) -> np.ndarray:
    """Return the loss of each row; overwrite the logits with the gradient of `scale * sum(losses)`.

    Args:
        logits: `[rows, vocabulary]`, float32 or bfloat16 patterns (uint16), overwritten with
            `(softmax - one_hot(label)) * scale`, in their own type, rounded once; ignored rows
            become 0. Rows may be padded.
        labels: int64 `[rows]`.
        ignore_index: the label of ignored rows; their loss is 0.
        scale: usually 1 / number of labels that are not ignored.

    Returns:
        float32 `[rows]`, not scaled; NaN where a logit is NaN or +infinity.

    Raises:
        DataError: a label is outside the vocabulary; the logits are then unchanged.
        ValueError: an array has another type, shape or layout.
    """
    _check(logits, labels, ignore_index, write=True)
    losses = np.empty(labels.size, np.float32)
    flat, stride = flat_rows(logits)
    width, factor = logits.shape[1], np.float32(scale)
    _loss_and_gradient(flat, stride, width, labels, ignore_index, factor, losses)
    return losses
