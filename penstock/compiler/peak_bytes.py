"""The peak of the bytes that a graph allocates."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from penstock.compiler import (
    cached_attention,
    onednn_products,
    ops,  # noqa: F401  (registers the penstock operators)
    recurrent_layer,
    token_products,
)
from penstock.compiler.attention_calls import attention_scratch_bytes
from penstock.compiler.fused_head import chunk_bytes, chunk_rows, scratch_bytes
from penstock.compiler.product_libraries import Products
from penstock.compiler.sparse_lowering import (
    head_scratch_bytes,
    sparse_scratch_bytes,
    sparse_weight_of,
)
from penstock.compiler.tensors import storage_of, tensors_in

penstock = torch.ops.penstock

_SCRATCH_OF: dict[Any, Callable[..., int]] = {
    penstock.onednn_linear.default: onednn_products.scratch_bytes,
    penstock.token_linear.default: token_products.scratch_bytes,
    penstock.attention_at_position.default: cached_attention.scratch_bytes,
}


def peak_bytes(graph: fx.Graph, products: Products = "torch") -> int:
    """Return the peak of the bytes that a run of the graph allocates, including its results.

    `products` is the library of its products.

    Storages are counted, not tensors: a view costs nothing. A storage is freed after the last
    reader of any of its views, as in the code that runs the graph.
    """
    nodes = list(graph.nodes)
    given: set[int] = set()
    written = _written_in_place(nodes)
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    born: dict[int, int] = {}
    for position, node in enumerate(nodes):
        if node.op == "placeholder":
            given.update(s for s, _ in _storages(node))
        for source in node.all_input_nodes:
            for storage, _ in _storages(source):
                last[written.get(storage, storage)] = position
        if node.op == "call_function" and node.target is not operator.getitem:
            for storage, amount in _storages(node):
                if storage in written:
                    continue
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
        peak = max(peak, alive + _scratch(node, products))
        if node.op != "output":
            alive -= deaths.get(position, 0)
    return peak


def _written_in_place(nodes: list[fx.Node]) -> dict[int, int]:
    """Return, for the results of nodes that executables write into an operand, its storage."""
    written: dict[int, int] = {}
    for node in nodes:
        if node.target is penstock.with_row.default:
            kept: Any = node.args[0]
            ((of_kept, _),), ((storage, _),) = _storages(kept), _storages(node)
            written[storage] = written.get(of_kept, of_kept)
    return written


def _storages(node: fx.Node) -> list[tuple[int, int]]:
    tensors = tensors_in(node.meta.get("val"))
    return [(storage_of(tensor), int(tensor.untyped_storage().nbytes())) for tensor in tensors]


def _value(arg: Any) -> Any:
    return fx.node.map_arg(arg, lambda n: n.meta["val"])


def _scratch(node: fx.Node, products: Products) -> int:
    """Return the bytes that an operator allocates internally: the chunk of logits, the panels of a
    sparse product, the tiles of attention, or the gates of a recurrent layer."""
    heads = {
        penstock.linear_cross_entropy.default: 0,
        penstock.linear_cross_entropy_predictions.default: 0,
        penstock.linear_cross_entropy_backward.default: 1,
        penstock.linear_cross_entropy_turn.default: 1,
    }
    layers = {
        penstock.recurrent_layer.default: False,
        penstock.recurrent_layer_backward.default: True,
    }
    if node.target in layers:
        given = (_value(argument) for argument in node.args[:4])
        return recurrent_layer.scratch_bytes(*given, with_gradients=layers[node.target])
    if node.target in _SCRATCH_OF:
        return _SCRATCH_OF[node.target](*(_value(argument) for argument in node.args))
    if node.target not in heads:
        return sparse_scratch_bytes(node) + attention_scratch_bytes(node, products)
    hidden, weight = (_value(a) for a in node.args[heads[node.target] :][:2])
    gradients = heads[node.target] == 1
    sparse = sparse_weight_of(node)
    if sparse is None:
        return scratch_bytes(hidden, weight, gradients, products)
    element_bytes = hidden.element_size()
    rows = chunk_rows(hidden.shape[0], weight.shape[0], element_bytes)
    logits = chunk_bytes(hidden, weight.shape[0])
    return head_scratch_bytes(sparse, rows, logits, element_bytes, gradients)
