"""The cost of a graph: floating-point operations and the peak of its allocated bytes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from penstock.compiler import ops  # noqa: F401  (registers the penstock operators)
from penstock.compiler.fused_head import chunk_bytes, chunk_rows, scratch_bytes
from penstock.compiler.products import onednn_flops
from penstock.compiler.sparse_lowering import (
    head_scratch_bytes,
    share_of,
    sparse_scratch_bytes,
    sparse_weight_of,
)

aten = torch.ops.aten
penstock = torch.ops.penstock


_ONEDNN = "mkldnn::_linear_pointwise"


def graph_flops(graph: fx.Graph) -> int:
    """Return the operations of the graph's products, a multiply-add counted as two."""
    total = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == _ONEDNN:
            total += onednn_flops(*_values(node.args))
            continue
        own = _OWN.get(node.target)
        if own is not None:
            kept, elements = share_of(node)
            total += own(*_values(node.args)) * kept // elements
        elif isinstance(node.target, torch._ops.OpOverload):
            formula = flop_registry.get(node.target.overloadpacket)
            if formula is not None:
                args = _values(node.args)
                kwargs = {k: _value(v) for k, v in node.kwargs.items()}
                total += int(formula(*args, **kwargs, out_val=node.meta["val"]))
    return total


def _values(args: Any) -> tuple[Any, ...]:
    return tuple(_value(a) for a in args)


def _value(arg: Any) -> Any:
    return fx.node.map_arg(arg, lambda n: n.meta["val"])


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> int:
    batch, length = math.prod(query.shape[:-2]), query.shape[-2]
    return 2 * batch * length * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> int:
    # Five products (scores again, dV, dP, dQ, dK) against the forward's two.
    return 5 * _attention(query, key, value) // 2


def _product(x: torch.Tensor, weight: torch.Tensor) -> int:
    return 2 * x.numel() // x.shape[-1] * weight.numel()


def _head(hidden: torch.Tensor, weight: torch.Tensor) -> int:
    return 2 * hidden.shape[0] * hidden.shape[1] * weight.shape[0]


_OWN: Mapping[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    penstock.linear_cross_entropy.default: lambda h, w, *_: _head(h, w),
    penstock.linear_cross_entropy_predictions.default: lambda h, w, *_: _head(h, w),
    penstock.linear_cross_entropy_backward.default: lambda s, h, w, *_: 3 * _head(h, w),
    penstock.linear_cross_entropy_turn.default: lambda s, h, w, *_: 3 * _head(h, w),
    penstock.sparse_linear.default: lambda x, w, *_: _product(x, w),
    penstock.sparse_weight_gradient.default: lambda x, g, w, *_: _product(x, w),
}


def peak_bytes(graph: fx.Graph) -> int:
    """Return the peak of the bytes that a run of the graph allocates, including its results.

    Storages are counted, not tensors: a view costs nothing. A storage is freed after the last
    reader of any of its views, as in the code that runs the graph.
    """
    nodes = list(graph.nodes)
    given: set[int] = set()
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    born: dict[int, int] = {}
    for position, node in enumerate(nodes):
        if node.op == "placeholder":
            given.update(s for s, _ in _storages(node))
        for source in node.all_input_nodes:
            for storage, _ in _storages(source):
                last[storage] = position
        if node.op == "call_function" and node.target is not operator.getitem:
            for storage, amount in _storages(node):
                if storage not in given and storage not in born:
                    born[storage], size[storage] = position, amount
                last.setdefault(storage, position)
    deaths: dict[int, int] = {}
    births: dict[int, int] = {}
    for storage, start in born.items():
        births[start] = births.get(start, 0) + size[storage]
        end = last.get(storage, start)
        deaths[end] = deaths.get(end, 0) + size[storage]
    alive = peak = 0
    for position, node in enumerate(nodes):
        alive += births.get(position, 0)
        peak = max(peak, alive + _scratch(node))
        if node.op != "output":
            alive -= deaths.get(position, 0)
    return peak


def _storages(node: fx.Node) -> list[tuple[int, int]]:
    value = node.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return [
        (int(t.untyped_storage()._cdata), int(t.untyped_storage().nbytes()))
        for t in tensors
        if isinstance(t, torch.Tensor)
    ]


def _scratch(node: fx.Node) -> int:
    """Return the bytes that a penstock operator allocates internally: the chunk of logits, or the
    panels of a sparse product."""
    heads = {
        penstock.linear_cross_entropy.default: 0,
        penstock.linear_cross_entropy_predictions.default: 0,
        penstock.linear_cross_entropy_backward.default: 1,
        penstock.linear_cross_entropy_turn.default: 1,
    }
    if node.target not in heads:
        return sparse_scratch_bytes(node)
    hidden, weight = (_value(a) for a in node.args[heads[node.target] :][:2])
    gradients = heads[node.target] == 1
    sparse = sparse_weight_of(node)
    if sparse is None:
        return scratch_bytes(hidden, weight, gradients)
    element_bytes = hidden.element_size()
    rows = chunk_rows(hidden.shape[0], weight.shape[0], element_bytes)
    logits = chunk_bytes(hidden, weight.shape[0])
    return head_scratch_bytes(sparse, rows, logits, element_bytes, gradients)
