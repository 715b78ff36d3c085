"""Compiles kernels of a run while another process builds the run's model.

    python -m penstock.kernels.compiled_ahead bf16 attention:64 loss adamw

calls the kernels of each group once, with arrays of the types that a run in this precision gives
them. The machine code goes to the cache of kernels, from which the run reads it. The standard input
is a pipe from the process of the run: the process ends when the pipe ends.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.kernels import attention, cross_entropy, gelu, split_master
from penstock.kernels.adamw import adamw
from penstock.kernels.attention_shape import TILE, Shape, Tokens
from penstock.kernels.exact_sum import exact_sum
from penstock.kernels.gradients import add_gradient, copy_gradient
from penstock.kernels.memory import allocate
from penstock.kernels.transposed_copy import copy_transposed

_ELEMENTS = 1 << 10
_SMALL_VOCABULARY = 64
_NUMBERS: dict[str, Any] = {
    "step": 1,
    "learning_rate": 0.0,
    "beta1": 0.5,
    "beta2": 0.5,
    "epsilon": 1.0,
    "weight_decay": 0.0,
}
TYPES = {"fp32": "float32", "bf16": "uint16"}
"""The type of the activations of a precision; bfloat16 is represented by its uint16 patterns."""


def _zeros(count: int, dtype: str) -> np.ndarray:
    """Return zeros in memory such as a store has."""
    return allocate(count * np.dtype(dtype).itemsize).view(dtype)


def _attention(dtype: str, size: str) -> None:
    head = int(size)
    shape, form = Shape(1, 1, 1, TILE, TILE, head), (TILE * head, TILE * head, head)

    def tokens() -> Tokens:
        return Tokens(np.zeros(TILE * head, dtype), form)

    query, key, value, out, gradient = (tokens() for _ in range(5))
    logarithms = Tokens(np.zeros(TILE, np.float32), (TILE, TILE, 1))
    options: dict[str, Any] = {"shape": shape, "is_causal": True, "scale": 1.0}
    attention.attention(query, key, value, out, logarithms, **options)
    inputs, written = (gradient, query, key, value, out, logarithms), (tokens(), tokens(), tokens())
    attention.attention_backward(*inputs, written, **options)


def _transposition(_: str, __: str) -> None:
    copy_transposed(np.zeros((2, 2), np.float32), np.zeros(4, np.float32))


def _loss(dtype: str, _: str) -> None:
    logits, labels = np.zeros((2, _SMALL_VOCABULARY), dtype), np.zeros(2, np.int64)
    cross_entropy.cross_entropy_and_gradient(logits, labels, ignore_index=-1, scale=1.0)


def _evaluation(dtype: str, _: str) -> None:
    logits, labels = np.zeros((2, _SMALL_VOCABULARY), dtype), np.zeros(2, np.int64)
    cross_entropy.cross_entropy(logits, labels, ignore_index=-1)
    cross_entropy.most_likely(logits)


def _gelu(dtype: str, _: str) -> None:
    x, gradient, out = (np.zeros(_ELEMENTS, dtype) for _ in range(3))
    gelu.gelu(x, out)
    gelu.gelu_backward(gradient, x, out)


def _gradients(dtype: str, _: str) -> None:
    """Gradients arrive as float32; those of norms and biases are kept in it."""
    source = _zeros(_ELEMENTS, "float32")
    for form in dict.fromkeys((dtype, "float32")):
        kept = _zeros(_ELEMENTS, form)
        exact_sum(copy_gradient(source, kept))
        add_gradient(source, kept)


def _masters(dtype: str, _: str) -> None:
    """Weights in bf16 have masters in two halves."""
    if dtype == "uint16":
        master, high, low = _zeros(_ELEMENTS, "float32"), *_halves()
        split_master.split(master, high, low)
        split_master.join(high, low, master)


def _adamw(dtype: str, _: str) -> None:
    """Gradients of norms and biases are float32 in each precision."""
    for kept in dict.fromkeys((dtype, "float32")):
        weight = _halves() if dtype == "uint16" else (_zeros(_ELEMENTS, "float32"),)
        moments = _zeros(_ELEMENTS, "float32"), _zeros(_ELEMENTS, "float32")
        adamw(weight, _zeros(_ELEMENTS, kept), *moments, **_NUMBERS)


def _halves() -> tuple[np.ndarray, np.ndarray]:
    return _zeros(_ELEMENTS, "uint16"), _zeros(_ELEMENTS, "uint16")


GROUPS: dict[str, Callable[[str, str], None]] = {
    "masters": _masters,
    "attention": _attention,
    "gelu": _gelu,
    "transposition": _transposition,
    "loss": _loss,
    "gradients": _gradients,
    "adamw": _adamw,
    "evaluation": _evaluation,
}
"""The kernels in the order in which a run needs them; after a colon attention has the size of a
head."""


def main(arguments: Sequence[str]) -> None:
    """Compile the groups of a command line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the run decides when to end
    threading.Thread(target=_end_with_input, daemon=True).start()
    precision, *groups = arguments
    for each in groups:
        name, _, size = each.partition(":")
        GROUPS[name](TYPES[precision], size)


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
