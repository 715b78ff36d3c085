"""Which library multiplies float32 matrices on the CPU.

PyTorch computes float32 products with MKL and bfloat16 products with oneDNN. On processors that are
not from Intel, oneDNN is also faster for float32 (measured: 1.15 to 1.35 times for the shapes of
GPT-2 on Zen 4, `docs/decisions.md`), so large products use oneDNN there. The two libraries sum in
different orders, so the choice affects bits. A target chooses by the processor alone, never by a
timing. A run records the choice, and all processes of the run and every resume compile with the
recorded library.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, fx

from penstock.kernels.processor import Processor

aten = torch.ops.aten
penstock = torch.ops.penstock

Products = Literal["torch", "onednn"]
"""The library for products of large float32 matrices: PyTorch's default, or oneDNN."""

_LEAST_FLOPS = 1 << 22  # smaller products are too short for the library to matter


def has_onednn() -> bool:
    """Return whether this PyTorch allows the explicit use of oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def products_for(processor: Processor) -> Products:
    """Return the library for large float32 products on a processor, with this PyTorch."""
    if not processor.is_x86 or processor.vendor in (None, "GenuineIntel"):
        return "torch"
    return "onednn" if has_onednn() else "torch"


def product(left: Tensor, right: Tensor, onednn: bool) -> Tensor:
    """Return `left @ right` for matrices; large float32 ones on the CPU by oneDNN, if `onednn`."""
    if (
        onednn
        and left.dtype == torch.float32
        and left.device.type == "cpu"
        and 2 * left.shape[0] * left.shape[1] * right.shape[1] >= _LEAST_FLOPS
    ):
        return torch.ops.mkldnn._linear_pointwise.default(left, right.t(), None, "none", [], "")
    return torch.mm(left, right)


def choose_products(graph: fx.Graph, products: Products) -> None:
    """Make a traced graph's large float32 products use the chosen library."""
    if products == "torch":
        return
    heads = (
        penstock.linear_cross_entropy.default,
        penstock.linear_cross_entropy_predictions.default,
        penstock.linear_cross_entropy_backward.default,
    )
    for node in list(graph.nodes):
        if node.target in heads:
            node.kwargs = {**node.kwargs, "onednn": True}
            continue
        if node.target is aten.mm.default:
            bias, (left, right) = None, node.args
        elif node.target is aten.addmm.default and not node.kwargs:
            bias, left, right = node.args
            if bias.meta["val"].shape != right.meta["val"].shape[1:]:
                continue
        else:
            continue
        value: Tensor = node.meta["val"]
        if value.dtype != torch.float32 or value.device.type != "cpu":
            continue
        if 2 * value.numel() * left.meta["val"].shape[1] < _LEAST_FLOPS:
            continue
        with graph.inserting_before(node):
            turned = graph.call_function(aten.t.default, (right,))
            turned.meta["val"] = right.meta["val"].t()
            arguments: tuple[Any, ...] = (left, turned, bias, "none", [], "")
            chosen = graph.call_function(torch.ops.mkldnn._linear_pointwise.default, arguments)
            chosen.meta["val"] = value
        node.replace_all_uses_with(chosen)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def onednn_flops(left: Tensor, right: Tensor, *_: Any) -> int:
    """Return the operations of one such product; `right` is [columns, inner]."""
    return 2 * left.shape[0] * left.shape[1] * right.shape[0]
