"""The costs of a graph's operators: kind of work, floating-point operations, and bytes moved.

A view costs nothing. An operator that looks up rows of a table reads these rows, not the table.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from penstock.compiler import (
    activation_calls,
    attention_calls,
    cached_attention,
    ops,  # noqa: F401  (registers the penstock operators)
)
from penstock.compiler.recurrent_layer import flops
from penstock.compiler.sparse_lowering import share_of, sparse_weight_of
from penstock.compiler.tensors import storage_of, tensors_in
from penstock.compiler.weight_products import weight_product_of
from penstock.operator_cost import OperatorCost

aten = torch.ops.aten
penstock = torch.ops.penstock

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "onednn_linear", "token_linear"}
_OPERATORS: dict[Any, Any] = {
    **activation_calls.OPERATORS,
    **attention_calls.OPERATORS,
    cached_attention.write_row: penstock.with_row.default,
}
_WORK_OF_OPERATORS = {
    "norm": """
        native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
        native_batch_norm native_batch_norm_backward _fused_rms_norm _fused_rms_norm_backward
        _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    """,
    "activation": """
        gelu gelu_backward silu silu_backward sigmoid sigmoid_backward tanh tanh_backward exp log
        erf pow softplus softplus_backward mish mish_backward sin cos elu elu_backward dropout
    """,
    "reduction": "sum mean amax amin var var_mean cumsum",
    "lookup": """
        embedding embedding_dense_backward gather index index_select index_put scatter scatter_add
    """,
    "copy": """
        _to_copy cat clone copy full zeros constant_pad_nd slice_scatter select_scatter new_zeros
        stack fill with_row
    """,
}
_WORK = {name: work for work, names in _WORK_OF_OPERATORS.items() for name in names.split()}
_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "bfloat16"}


def operator_costs(graph: fx.Graph, without: Collection[fx.Node] = ()) -> tuple[OperatorCost, ...]:
    """Return the costs of a traced graph, equal calls together, in the order of their first.

    Nodes that call the engine's own objects, as sparse weights in a lowered graph, have none.

    **Arguments:** `without` are nodes to leave out.
    """
    left_out = set(without)
    nodes = (node for node in graph.nodes if node not in left_out)
    found = Counter(cost for node in nodes for cost in _costs(node))
    return tuple(replace(cost, calls=calls) for cost, calls in found.items())


def total_flops(costs: tuple[OperatorCost, ...]) -> int:
    """Return the operations of some calls, a multiply-add counted as two."""
    return sum(cost.flops * cost.calls for cost in costs)


def weight_flops(weight: fx.Node) -> int:
    """Return the operations of the products that read a sparse weight, of a traced graph."""
    return sum(_flops(node) for node in weight.users if sparse_weight_of(node) is weight)


def operator_of(node: fx.Node) -> Any:
    """Return the operator of a node, also where a function computes it."""
    target: Any = node.target
    return _OPERATORS.get(target, target)


def _costs(node: fx.Node) -> Iterator[OperatorCost]:
    """Yield the cost of a node; nothing for a node that computes nothing."""
    target = operator_of(node)
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return
    name = target._schema.name.rpartition("::")[2]
    flops, moved = _flops(node), _moved_bytes(node, name)
    if not flops and not moved:
        return
    work, size, layout = _work(node, name, flops), float(moved), "any"
    if work == "product":
        size, layout = _product_shape(node)
    elif work == "sparse product":
        kept, elements = share_of(node)
        size = kept / elements
    elif work == "attention":
        size = float(_value(node.args[_QUERY.get(target, 0)]).shape[-2])
    elif work == "head":
        size = float(_value(node.args[_HIDDEN.get(target, 0)]).shape[0])
    cost = OperatorCost(name, work, _dtype(node), layout, size, flops, moved)
    weight = weight_product_of(node)
    if weight is not None:
        cost = replace(cost, form=weight.form, outputs=weight.outputs, inputs=weight.inputs)
    yield cost


def _work(node: fx.Node, name: str, flops: int) -> str:
    if name.startswith("linear_cross_entropy"):
        return "head"
    if name in ("sparse_linear", "sparse_weight_gradient"):
        return "sparse product"
    if name in _PRODUCTS:
        return "product"
    if name.startswith(("_scaled_dot_product", "attention_at_position")):
        return "attention"
    return "product" if flops else _WORK.get(name, "pointwise")


def _product_shape(node: fx.Node) -> tuple[float, str]:
    """Return the smallest dimension of a product of matrices, and over what it sums.

    The gradient of a weight sums over tokens; its left factor is a transposed view.
    """
    tensors = [value for value in _values(node.args) if _is_matrix(value)]
    if len(tensors) < 2:
        return float(min((s for t in tensors for s in t.shape if s > 1), default=1)), "features"
    left, right = tensors[-2:] if len(tensors) > 2 else tensors
    sizes = [*left.shape[-2:], *right.shape[-2:]]
    is_transposed = left.stride(-2) == 1 and left.stride(-1) != 1
    return float(min(sizes)), "tokens" if is_transposed else "features"


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 2


def _dtype(node: fx.Node) -> str:
    """Return the type of a node's first floating-point operand or result with a dimension: the
    gradient of a loss is a float32 number in a stage of any type."""
    for value in (*_values(node.args), *tensors_in(node.meta.get("val"))):
        if isinstance(value, torch.Tensor) and value.dim() and value.dtype in _TYPES:
            return _TYPES[value.dtype]
    return "any"


def _moved_bytes(node: fx.Node, name: str) -> int:
    """Return the bytes of a node's operands and results; 0 for a view."""
    results = list(tensors_in(node.meta.get("val")))
    operands = [
        value for source in node.all_input_nodes for value in tensors_in(source.meta.get("val"))
    ]
    known = {storage_of(value) for value in operands}
    schema = operator_of(node)._schema
    if not schema.is_mutable and all(storage_of(value) in known for value in results):
        return 0
    written = sum(value.nbytes for value in results)
    if name in ("embedding", "index_select", "gather", "index"):
        return 2 * written
    if name == "with_row":
        return 2 * int(_value(node.args[1]).nbytes)
    if name in ("full", "zeros", "new_zeros", "fill"):
        return written
    return written + sum(value.nbytes for value in operands)


def _flops(node: fx.Node) -> int:
    target = operator_of(node)
    own = _OWN.get(target)
    if own is not None:
        kept, elements = share_of(node)
        return own(*_values(node.args)) * kept // elements
    formula = flop_registry.get(target.overloadpacket)
    if formula is None:
        return 0
    kwargs = {key: _value(value) for key, value in node.kwargs.items()}
    return int(formula(*_values(node.args), **kwargs, out_val=node.meta["val"]))


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


def _head_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, bias: Any, labels: Any, ignored: int, *args: Any
) -> int:
    # The logits, the gradient of the hidden features, and that of the weight unless it is frozen.
    return (3 if args[0] else 2) * _head(hidden, weight)


# PyTorch's own formulas refuse query heads that share keys, in some of its versions.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    penstock.attention_at_position.default,
}
_ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
}
_OWN: Mapping[Any, Callable[..., int]] = {
    **dict.fromkeys(_ATTENTION, _attention),
    **dict.fromkeys(_ATTENTION_BACKWARD, _attention_backward),
    penstock.linear_cross_entropy.default: lambda h, w, *_: _head(h, w),
    penstock.linear_cross_entropy_predictions.default: lambda h, w, *_: _head(h, w),
    penstock.linear_cross_entropy_backward.default: lambda s, *args: _head_gradients(*args),
    penstock.linear_cross_entropy_turn.default: lambda s, *args: _head_gradients(*args),
    penstock.recurrent_layer.default: lambda mode, x, states, weights, *_: flops(x, weights),
    # The forward again, the gradient of its inputs, and those of its weights.
    penstock.recurrent_layer_backward.default: lambda mode, x, states, weights, *_: (
        3 * flops(x, weights)
    ),
    penstock.onednn_linear.default: lambda x, w, *_: _product(x, w),
    penstock.token_linear.default: lambda x, w, *_: _product(x, w),
    penstock.sparse_linear.default: lambda x, w, *_: _product(x, w),
    penstock.sparse_weight_gradient.default: lambda x, g, w, *_: _product(x, w),
}
_QUERY = dict.fromkeys(_ATTENTION_BACKWARD, 1)
_HIDDEN = {
    penstock.linear_cross_entropy_backward.default: 1,
    penstock.linear_cross_entropy_turn.default: 1,
}
