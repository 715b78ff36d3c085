"""Which library multiplies float32 matrices on the CPU.

PyTorch hands float32 products to MKL and bfloat16 products to oneDNN. On processors that are not
Intel's, oneDNN is the faster one for float32 too (measured: 1.15 to 1.35 times for the shapes of
GPT-2 on Zen 4, `docs/decisions.md`), so there large products go to it. The choice depends on the
machine alone, never on a timing, so that equal runs stay equal to the bit.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_LEAST_FLOPS = 1 << 22  # smaller products are over before a library could matter


@functools.cache
def prefers_onednn() -> bool:
    """Tell whether float32 products should go to oneDNN on this machine's processor."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "GenuineIntel" not in cpuinfo.read_text(errors="replace")


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` for matrices, by the library that is chosen for them."""
    if (
        left.dtype == torch.float32
        and left.device.type == "cpu"
        and 2 * left.shape[0] * left.shape[1] * right.shape[1] >= _LEAST_FLOPS
        and prefers_onednn()
    ):
        return torch.ops.mkldnn._linear_pointwise.default(left, right.t(), None, "none", [], "")
    return torch.mm(left, right)


def choose_products(graph: fx.Graph) -> None:
    """Send a traced graph's large float32 products to oneDNN, where that is preferred."""
    if not prefers_onednn():
        return
    for node in list(graph.nodes):
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
