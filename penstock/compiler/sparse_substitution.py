"""Products with a sparse weight in a stage's graph become sparse products.

Recognised are linear layers, `x @ W` (GPT-2's Conv1D) and `W @ x`, also of the transposed weight,
with or without a bias, and the head that is fused with its loss. Every other reader of the weight
gets it expanded: a masked dense product.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from penstock import sparsity  # whose names load a compiler at their first use
from penstock.compiler import ops, sparse_ops  # noqa: F401  (register the operators)
from penstock.compiler.fused_head import chunk_rows
from penstock.compiler.nodes import arguments_by_name, value_of
from penstock.errors import ConfigError, few
from penstock.program import SparseUse, WeightSpec

aten = torch.ops.aten
penstock = torch.ops.penstock

_UNCHANGED = {aten.alias.default, aten.contiguous.default}
_CASTS = {aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout}
_EXCHANGES = {aten.t.default, aten.numpy_T.default, aten.mT.default}
_PRODUCTS = {aten.mm.default, aten.matmul.default, aten.mv.default}
HEADS = {
    penstock.linear_cross_entropy.default,
    penstock.linear_cross_entropy_predictions.default,
}


def require_weights(sparse: Mapping[str, int], names: Collection[str]) -> None:
    """Reject sparse weights that the model does not have.

    Raises:
        ConfigError: naming the unknown weights.
    """
    unknown = [name for name in sparse if name not in names]
    if unknown:
        raise ConfigError(
            f"sparse weights: expected names of {few(list(names))}, got {few(unknown)}; use a "
            "tied weight's first name"
        )


def sparse_sizes(name: str, elements: int, capacity: int | None) -> dict[str, int]:
    """Return the fields of a weight's specification that only sparse weights have.

    Raises:
        ConfigError: the capacity is not one of such a weight.
    """
    if capacity is None:
        return {}
    if not 0 <= capacity <= elements:
        raise ConfigError(
            f"sparse weights: expected a capacity of {name!r} from 0 to {elements}, its elements, "
            f"got {capacity}"
        )
    return {"capacity": capacity, "index_bytes": sparsity.max_compact_bytes(capacity, elements)}


@dataclass(frozen=True)
class _Form:
    """A node with the values of a weight, as they are or transposed."""

    node: fx.Node
    is_transposed: bool


def substitute_products(graph: fx.Graph, weight: fx.Node, spec: WeightSpec) -> SparseUse:
    """Replace the readers of the placeholder `weight` of a stage's graph; return what was found."""
    tokens: set[int] = set()
    forms = [_Form(weight, False)]
    if len(spec.shape) == 2:
        forms += _forms_of(forms[0], spec)
        for form in forms:
            for reader in list(form.node.users):
                found = _substitute(graph, reader, form, weight, spec)
                if found is not None:
                    tokens.add(found)
    for form in reversed(forms[1:]):
        if not form.node.users:
            graph.erase_node(form.node)
    return SparseUse(spec.capacity, tuple(sorted(tokens)), _expand_for_others(graph, weight))


def _forms_of(form: _Form, spec: WeightSpec) -> Iterator[_Form]:
    """Yield the transposes and exact copies of a form, and theirs."""
    for reader in form.node.users:
        kept = _exchanges(reader, form.node, spec)
        if kept is not None:
            following = _Form(reader, form.is_transposed != kept)
            yield following
            yield from _forms_of(following, spec)


def _exchanges(reader: fx.Node, source: fx.Node, spec: WeightSpec) -> bool | None:
    """Return whether a node transposes its matrix; None if its values are others."""
    if reader.all_input_nodes != [source] or reader.op != "call_function":
        return None
    if reader.target in _UNCHANGED:
        return False
    if reader.target in _CASTS:
        return False if value_of(reader).dtype == spec.stream_dtype else None
    if reader.target in _EXCHANGES:
        return True
    if reader.target is aten.transpose.int:
        arguments = arguments_by_name(reader)
        return (arguments["dim0"] - arguments["dim1"]) % 2 == 1
    if reader.target is aten.permute.default:
        return [dim % 2 for dim in arguments_by_name(reader)["dims"]] == [1, 0]
    return None


def _substitute(
    graph: fx.Graph, reader: fx.Node, form: _Form, weight: fx.Node, spec: WeightSpec
) -> int | None:
    """Replace a reader if it is a product with the matrix; return the tokens of the product."""
    if reader.target in HEADS:
        return _substitute_head(reader, form, weight, spec)
    product = _product_of(reader, form)
    if product is None or weight in product[:2]:
        return None
    x, bias, transposed = product
    outputs = spec.shape[1 if transposed else 0]
    tokens = value_of(reader).numel() // outputs
    is_turned = _is_left(reader, form.node) and value_of(x).dim() == 2
    fuses = bias is not None and tuple(value_of(bias).shape) == (outputs,)
    with graph.inserting_before(reader):
        if is_turned:
            x = graph.call_function(aten.t.default, (x,))
        arguments = (x, weight, bias if fuses else None, transposed)
        result = graph.call_function(penstock.sparse_linear.default, arguments)
        if is_turned:
            result = graph.call_function(aten.t.default, (result,))
            result = graph.call_function(aten.contiguous.default, (result,))
        if bias is not None and not fuses:
            result = graph.call_function(aten.add.Tensor, (result, bias))
    result.meta = dict(reader.meta)
    reader.replace_all_uses_with(result)
    graph.erase_node(reader)
    return tokens


def _product_of(reader: fx.Node, form: _Form) -> tuple[fx.Node, fx.Node | None, bool] | None:
    """Return the other factor, the bias, and whether the product is with the weight's rows as
    inputs; None if the reader is no product with the form's matrix."""
    if reader.target is aten.linear.default:
        arguments = arguments_by_name(reader)
        if arguments["weight"] is not form.node or form.node in _others(arguments, "weight"):
            return None
        return arguments["input"], arguments.get("bias"), form.is_transposed
    if reader.target is aten.addmm.default:
        arguments = arguments_by_name(reader)
        is_plain = arguments.get("beta", 1) == 1 and arguments.get("alpha", 1) == 1
        if arguments["mat2"] is not form.node or form.node in _others(arguments, "mat2"):
            return None
        if not is_plain:
            return None
        return arguments["mat1"], arguments["self"], not form.is_transposed
    if reader.target in _PRODUCTS:
        left, right = reader.args
        if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or left is right:
            return None
        if right is form.node:
            return left, None, not form.is_transposed
        if value_of(right).dim() <= 2:  # W x = (x^T W^T)^T
            return right, None, form.is_transposed
    return None


def _others(arguments: dict[str, Any], name: str) -> list[Any]:
    return [value for key, value in arguments.items() if key != name]


def _is_left(reader: fx.Node, node: fx.Node) -> bool:
    return reader.target in _PRODUCTS and reader.args[0] is node


def _substitute_head(reader: fx.Node, form: _Form, weight: fx.Node, spec: WeightSpec) -> int | None:
    """Let a fused head read the weight itself; return the tokens of a chunk."""
    hidden, matrix, bias, labels, ignore = reader.args
    if matrix is not form.node or form.is_transposed or form.node in (hidden, bias, labels):
        return None
    reader.args = (hidden, weight, bias, labels, ignore)
    assert isinstance(hidden, fx.Node)
    rows, element_bytes = value_of(hidden).shape[0], spec.stream_dtype.itemsize
    return chunk_rows(rows, spec.shape[0], element_bytes)


def _expand_for_others(graph: fx.Graph, weight: fx.Node) -> tuple[str, ...]:
    """Give readers without a sparse product the expanded weight; return their operators."""
    others = [node for node in weight.users if not reads_sparse(node, weight)]
    if not others:
        return ()
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        dense = graph.call_function(penstock.sparse_to_dense.default, (weight,))
    for node in others:
        node.replace_input_with(weight, dense)
    return tuple(dict.fromkeys(map(_operator, others)))


def reads_sparse(node: fx.Node, weight: fx.Node) -> bool:
    """Return whether a node reads a sparse weight as such, and no other argument is the weight."""
    place = WEIGHT_PLACES.get(node.target)
    if place is None or node.args[place] is not weight:
        return False
    return list(node.args).count(weight) == 1


WEIGHT_PLACES: dict[Any, int] = {
    penstock.sparse_linear.default: 1,
    penstock.sparse_weight_gradient.default: 2,
    penstock.sparse_to_dense.default: 0,
    penstock.sparse_entries.default: 1,
    penstock.linear_cross_entropy.default: 1,
    penstock.linear_cross_entropy_predictions.default: 1,
    penstock.linear_cross_entropy_backward.default: 2,
    penstock.linear_cross_entropy_turn.default: 2,
}
"""The operators that take a sparse weight, and the place of the weight among their arguments."""


def _operator(node: fx.Node) -> str:
    if node.op == "output":
        return "a later stage"
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return getattr(target, "__name__", str(target))
