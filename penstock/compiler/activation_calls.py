"""Activation functions that executables compute on a CPU with kernels of Penstock.

PyTorch evaluates the tanh of GELU by a slower function, and on some processors much slower for
bfloat16 (`benchmarks/activations.py`). A traced graph has PyTorch's operators; they are replaced in
executables, whose costs are counted as those of the operators.
"""

import torch
from torch import Tensor, fx

from penstock.compiler.tensors import elements_of

aten = torch.ops.aten

_TYPES = (torch.float32, torch.bfloat16)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return gelu of each element in its tanh form, in the type of `x`."""
    if not _has_kernel(x):
        return aten.gelu.default(x, approximate="tanh")
    from penstock.kernels import gelu as kernels  # loads a compiler

    out = torch.empty_like(x)
    kernels.gelu(elements_of(x), elements_of(out))
    return out


def gelu_tanh_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the inputs `x` of `gelu_tanh`, from that of its outputs."""
    if not (_has_kernel(x) and _has_kernel(gradient) and gradient.dtype == x.dtype):
        return aten.gelu_backward.default(gradient, x, approximate="tanh")
    from penstock.kernels import gelu as kernels

    out = torch.empty_like(x)
    kernels.gelu_backward(elements_of(gradient), elements_of(x), elements_of(out))
    return out


_CALLS = {aten.gelu.default: gelu_tanh, aten.gelu_backward.default: gelu_tanh_backward}
OPERATORS = {function: operator for operator, function in _CALLS.items()}
"""The operator that each function replaces: its costs are those of the operator."""


def lower_activations(graph: fx.Graph) -> None:
    """Let nodes of activations that a kernel computes on the CPU call it."""
    for node in graph.nodes:
        if node.target in _CALLS and node.kwargs.get("approximate") == "tanh":
            value = node.meta["val"]
            if value.device.type == "cpu" and value.dtype in _TYPES:
                node.target = _CALLS[node.target]
                node.kwargs = {k: v for k, v in node.kwargs.items() if k != "approximate"}


def _has_kernel(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _TYPES and x.is_contiguous()
