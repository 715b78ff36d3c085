"""One layer of a recurrent network, by PyTorch's own operator, and its gradients.

The gradients compute the forward again: a program keeps the layer's inputs, not its gates. On a GPU
an engine turns cuDNN off, whose layers have no fixed order of sums (`engine/repeatable.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}


def outputs(
    mode: str,
    values: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of all positions and the last states.

    Args:
        mode: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        values: `[positions, rows, features]`.
        states: `[directions, rows, hidden]`; an LSTM has two.
        weights: of each direction, in the order of the module.

    Returns:
        `[positions, rows, directions * hidden]`, then the states; the second one of a network that
        has one is empty.
    """
    made, last, *cells = _run(
        mode, values, states, weights, has_biases, bidirectional, is_training=False
    )
    cell = cells[0].contiguous() if cells else values.new_empty(0)
    return made.contiguous(), last.contiguous(), cell


def gradients(
    mode: str,
    values: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    bidirectional: bool,
    of_outputs: Sequence[Tensor],
) -> list[Tensor]:
    """Return the gradients of values, states and weights, from those of the three results of
    `outputs`."""
    with torch.enable_grad():
        given = [t.detach().requires_grad_() for t in (values, *states, *weights)]
        count = len(states)
        results = _run(
            mode,
            given[0],
            given[1 : 1 + count],
            given[1 + count :],
            has_biases,
            bidirectional,
            is_training=True,
        )
        found = torch.autograd.grad(results, given, list(of_outputs[: len(results)]))
    return [gradient.contiguous() for gradient in found]


def _run(
    mode: str,
    values: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    bidirectional: bool,
    *,
    is_training: bool,
) -> tuple[Tensor, ...]:
    first = list(states) if mode == "lstm" else states[0]
    results: tuple[Tensor, ...] = _FUNCTIONS[mode](
        values, first, list(weights), has_biases, 1, 0.0, is_training, bidirectional, False
    )
    return results


def flops(values: Tensor, weights: Sequence[Tensor]) -> int:
    """Return the operations of the products of a layer, a multiply-add counted as two."""
    rows = values.shape[0] * values.shape[1]
    return 2 * rows * sum(weight.numel() for weight in weights if weight.dim() == 2)


def scratch_bytes(
    mode: str,
    values: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    with_gradients: bool,
) -> int:
    """Return a bound on the bytes that a layer allocates beside its results.

    PyTorch's layers keep their gates, copies of their inputs and repacked weights. The factors are
    upper bounds over PyTorch's implementations on CPUs; those of an LSTM by oneDNN are the largest.
    """
    directions, rows = states[0].shape[0], values.shape[0] * values.shape[1]
    gates = directions * rows * weights[1].shape[0]
    sizes = directions * values.numel(), gates, sum(weight.numel() for weight in weights)
    factors = (2, 2, 2) if not with_gradients else (8, 8, 5) if mode == "lstm" else (4, 4, 2)
    total = sum(factor * size for factor, size in zip(factors, sizes, strict=True))
    return total * values.element_size()
