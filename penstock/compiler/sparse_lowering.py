"""Sparse weights in a traced graph: what they cost, and the functions that executables call.

A trace shows a sparse weight and its gradient with their dense shapes. Here the gradients get the
size that an engine allocates, float32 [capacity], and the nodes that read the weight get functions
over the engine's object (`sparse_calls.py`).
"""

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from penstock import sparsity  # whose names load a compiler at their first use
from penstock.compiler import sparse_calls
from penstock.compiler.sparse_substitution import WEIGHT_PLACES, reads_sparse
from penstock.errors import ProgramError
from penstock.program import SparseUse

aten = torch.ops.aten
penstock = torch.ops.penstock

_CAPACITY = "penstock_capacity"
_PRODUCTS = {penstock.sparse_linear.default, penstock.sparse_weight_gradient.default}
_GRADIENTS = {penstock.sparse_weight_gradient.default, penstock.sparse_entries.default}
_OF_HEADS: dict[Any, int] = {  # place of the weight's gradient among the results
    penstock.linear_cross_entropy_backward.default: 1,
    penstock.linear_cross_entropy_turn.default: 2,
}
_CALLS: dict[Any, Any] = {
    penstock.sparse_linear.default: sparse_calls.sparse_linear,
    penstock.sparse_weight_gradient.default: sparse_calls.sparse_weight_gradient,
    penstock.sparse_to_dense.default: sparse_calls.sparse_to_dense,
    penstock.sparse_entries.default: sparse_calls.sparse_entries,
    penstock.linear_cross_entropy.default: sparse_calls.linear_cross_entropy,
    penstock.linear_cross_entropy_predictions.default: (
        sparse_calls.linear_cross_entropy_predictions
    ),
    penstock.linear_cross_entropy_backward.default: sparse_calls.linear_cross_entropy_backward,
    penstock.linear_cross_entropy_turn.default: sparse_calls.linear_cross_entropy_turn,
}


def mark_sparse(joint: fx.Graph, sparse: Mapping[int, SparseUse]) -> None:
    """Mark the sparse weights of a joint graph, and give their gradients their size.

    Raises:
        ProgramError: an operator reads a sparse weight or its gradient that knows nothing of it.
    """
    placeholders = joint.find_nodes(op="placeholder")
    for position, use in sparse.items():
        weight = placeholders[position]
        weight.meta[_CAPACITY] = use.capacity
        for reader in weight.users:
            if not reads_sparse(reader, weight):
                raise ProgramError(
                    f"{reader.target} reads the sparse weight {weight.name} as a dense one"
                )
        for gradient in list(_gradients(weight)):
            _resize(gradient, use.capacity)


def sparse_weight_of(node: fx.Node) -> fx.Node | None:
    """Return the sparse weight that a node reads."""
    place = WEIGHT_PLACES.get(node.target)
    if place is None:
        return None
    weight = node.args[place]
    return weight if isinstance(weight, fx.Node) and _CAPACITY in weight.meta else None


def share_of(node: fx.Node) -> tuple[int, int]:
    """Return, for a node's operations, the kept and all elements of the sparse weight that it
    reads; 1 of 1 if it reads none."""
    weight = sparse_weight_of(node)
    if weight is None:
        return 1, 1
    return weight.meta[_CAPACITY], weight.meta["val"].numel()


def is_expanded(weight: fx.Node) -> bool:
    """Return whether a sparse weight is expanded for dense products: on every device but the
    CPU."""
    return weight.meta["val"].device.type != "cpu"


def sparse_scratch_bytes(node: fx.Node) -> int:
    """Return the bytes that a node with a sparse weight allocates besides its result."""
    weight = sparse_weight_of(node)
    if weight is None:
        return 0
    if node.target in _PRODUCTS:
        x: Any = node.args[0]
        return _product_bytes(weight, x.meta["val"].numel() // x.meta["val"].shape[-1])
    if not is_expanded(weight):
        return 0
    value = weight.meta["val"]
    shape = sparsity.matrix_shape(value.shape)
    if node.target is penstock.sparse_to_dense.default:
        return sparsity.expansion_bytes(shape)
    return sparsity.selection_bytes(shape, weight.meta[_CAPACITY], value.dtype)


def _product_bytes(weight: fx.Node, tokens: int) -> int:
    """Return the bytes that a product allocates besides its result."""
    value, capacity = weight.meta["val"], weight.meta[_CAPACITY]
    if is_expanded(weight):
        return sparsity.expanded_product_bytes(
            sparsity.matrix_shape(value.shape), capacity, value.dtype
        )
    return sparsity.product_bytes(value.numel(), sum(value.shape), capacity, tokens, value.dtype)


def head_scratch_bytes(
    weight: fx.Node, tokens: int, logits: int, element_bytes: int, gradients: bool
) -> int:
    """Return the bytes that a head with a sparse weight allocates besides its results.

    Args:
        tokens: rows of a chunk.
        logits: bytes of a chunk's logits, and of what their losses need.
        element_bytes: of the logits.
        gradients: whether gradients are computed.
    """
    value, capacity = weight.meta["val"], weight.meta[_CAPACITY]
    product = _product_bytes(weight, tokens)
    hidden = tokens * value.shape[1] * element_bytes if gradients else 0
    return logits + product + hidden + (4 * capacity if gradients else 0)


def lower(graph: fx.Graph) -> None:
    """Let the nodes that read sparse weights call the engine's objects."""
    for node in graph.nodes:
        if sparse_weight_of(node) is not None:
            node.target = _CALLS[node.target]


def calls_operand(node: fx.Node) -> bool:
    """Return whether a node of an executable calls the engine's object for a sparse weight."""
    return node.target in _CALLS.values()


def _gradients(weight: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that compute the gradient of a weight, and the sums of such gradients."""
    found: dict[fx.Node, None] = {}
    for reader in weight.users:
        if reader.target in _GRADIENTS:
            found[reader] = None
        elif reader.target in _OF_HEADS:
            place = _OF_HEADS[reader.target]
            for item in reader.users:
                if item.target is operator.getitem and item.args[1] == place:
                    found[item] = None
    pending = list(found)
    while pending:
        node = pending.pop()
        yield node
        for user in node.users:
            if user.op == "output" or user in found:
                continue
            if user.target not in (aten.add.Tensor, aten.clone.default):
                raise ProgramError(
                    f"{user.target} reads the gradient of the sparse weight {weight.name}"
                )
            found[user] = None
            pending.append(user)


def _resize(gradient: fx.Node, capacity: int) -> None:
    value: Any = gradient.meta["val"]
    with value.fake_mode:
        sized = torch.empty(capacity, dtype=torch.float32, device=value.device)
    gradient.meta["val"] = sized
    if gradient.target is operator.getitem:
        whole, place = gradient.args
        assert isinstance(whole, fx.Node)
        values = list(whole.meta["val"])
        values[place] = sized  # type: ignore[index]
        whole.meta["val"] = values
