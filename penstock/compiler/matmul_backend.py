"""Replaces the products of a traced graph by those of the chosen library (`product_libraries.py`).

Where bfloat16 is multiplied in float32, operands are widened and the product is rounded. The
products of two bfloat16 numbers are exact in float32, and are summed there in either case.
PyTorch's fused attention has plain loops in its backward pass, so its operands are widened too,
unless kernels of Penstock compute it (`attention_calls.py`): these widen one tile at a time, with
the same bits.

In programs of incremental decoding, products with one token have a kernel of their own
(`token_products.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from penstock.compiler import attention_calls, onednn_products, token_products
from penstock.compiler.product_libraries import Products, uses_onednn, widens

aten = torch.ops.aten
penstock = torch.ops.penstock

_LEAST_FLOPS = 1 << 22  # smaller products are too short for the library to matter
ALIGNED_COLUMNS = 16
"""Of float32 numbers, a cache line: MKL is slow to write another number of columns."""
_BAND_ELEMENTS = 1 << 20  # of an operand that a head widens at once


def product(left: Tensor, right: Tensor, products: str) -> Tensor:
    """Return `left @ right` for two matrices; on the CPU as `products` says."""
    if left.device.type == "cpu":
        if left.dtype == torch.bfloat16 and widens(products):
            return _widened(left, right, products)
        if left.dtype == torch.float32 and uses_onednn(products):
            flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
            if flops >= _LEAST_FLOPS:
                return onednn_products.linear(left, right.t())
    return torch.mm(left, right)


def _widened(left: Tensor, right: Tensor, products: str) -> Tensor:
    """Return a product of bfloat16 matrices by float32 ones, in bands of the longest dimension, so
    that little memory is needed."""
    (rows, inner), columns = left.shape, right.shape[1]
    _, second, longest = sorted((rows, inner, columns))
    step = max(1, _BAND_ELEMENTS // max(1, second))
    if longest == columns and step > ALIGNED_COLUMNS:
        step -= step % ALIGNED_COLUMNS
    bands = [slice(at, at + step) for at in range(0, longest, step)]
    if longest == inner:
        total = left.new_zeros((rows, columns), dtype=torch.float32)
        for band in bands:
            total += product(left[:, band].float(), right[band].float(), products)
        return total.to(left.dtype)
    out = left.new_empty((rows, columns))
    if longest == rows:
        whole = right.float()
        for band in bands:
            out[band] = product(left[band].float(), whole, products)
    else:
        whole = left.float()
        for band in bands:
            out[:, band] = product(whole, right[:, band].float(), products)
    return out


def choose_products(graph: fx.Graph, products: Products, *, one_token: bool = False) -> None:
    """Make a traced graph's products those that are chosen; `one_token` is whether the graph is one
    of incremental decoding."""
    if one_token:
        _choose(graph, penstock.token_linear.default, token_products.has_kernel)
    if products == "torch":
        return
    heads = (
        penstock.linear_cross_entropy.default,
        penstock.linear_cross_entropy_predictions.default,
        penstock.linear_cross_entropy_backward.default,
    )
    for node in list(graph.nodes):
        if node.target in heads:
            node.kwargs = {**node.kwargs, "products": products}
        elif widens(products) and _needs_float32(node, products):
            _widen(graph, node)
    if uses_onednn(products):
        _choose(graph, penstock.onednn_linear.default, _is_for_onednn)
    graph.eliminate_dead_code()


_BFLOAT16_LOOPS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.mv.default,
}


def _needs_float32(node: fx.Node, products: Products) -> bool:
    """Return whether PyTorch would compute a node on bfloat16 tensors with plain loops."""
    if node.target in attention_calls.OPERATORS.values():
        return not attention_calls.has_kernel(node, products)
    return node.target in _BFLOAT16_LOOPS


def _widen(graph: fx.Graph, node: fx.Node) -> None:
    """Compute an operator on bfloat16 tensors in float32, and round its results."""
    if not any(_is_narrow(operand) for operand in node.all_input_nodes):
        return
    with graph.inserting_before(node):
        widened = {
            operand: _cast(graph, operand, torch.float32)
            for operand in node.all_input_nodes
            if _is_narrow(operand)
        }
    for operand, wide in widened.items():
        node.replace_input_with(operand, wide)
    results = [node] if isinstance(node.meta["val"], Tensor) else list(node.users)
    values = pytree.tree_map_only(Tensor, _wide, node.meta["val"])
    for result in results:
        if _is_narrow(result):
            result.meta = {**result.meta, "val": _wide(result.meta["val"])}
            _round(graph, result)
    node.meta = {**node.meta, "val": values}


def _is_narrow(node: fx.Node) -> bool:
    value = node.meta["val"]
    is_tensor = isinstance(value, Tensor) and value.device.type == "cpu"
    return is_tensor and value.dtype == torch.bfloat16


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype == torch.bfloat16 else value


def _round(graph: fx.Graph, node: fx.Node) -> None:
    """Give the readers of a float32 result its bfloat16 value."""
    with graph.inserting_after(node):
        rounded = _cast(graph, node, torch.bfloat16)
    node.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    cast = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    cast.meta["val"] = node.meta["val"].to(dtype)
    return cast


def _is_for_onednn(left: Tensor, right: Tensor) -> bool:
    """Return whether oneDNN is to compute the product `left @ right`."""
    is_float32 = left.dtype == torch.float32 and left.device.type == "cpu"
    return is_float32 and 2 * left.numel() * right.shape[1] >= _LEAST_FLOPS


def _choose(
    graph: fx.Graph,
    operator: torch._ops.OpOverload,
    is_chosen: Callable[[Tensor, Tensor], bool],
) -> None:
    """Make the chosen products of matrices those of an operator that takes its right factor
    transposed."""
    for node in list(graph.nodes):
        if node.target is aten.mm.default:
            bias, (left, right) = None, node.args
        elif node.target is aten.addmm.default and not node.kwargs:
            bias, left, right = node.args
            if bias.meta["val"].shape != right.meta["val"].shape[1:]:
                continue
        else:
            continue
        if not is_chosen(left.meta["val"], right.meta["val"]):
            continue
        with graph.inserting_before(node):
            turned = graph.call_function(aten.t.default, (right,))
            turned.meta["val"] = right.meta["val"].t()
            chosen = graph.call_function(operator, (left, turned, bias))
            chosen.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(chosen)
        graph.erase_node(node)
