"""How each operator of a causal language model computes one position from the others.

A graph is captured for all positions of a window at once. For each node that depends on weights,
this module finds the dimension of its result that counts positions, and what the operator reads to
compute one position of it: the same position of an operand, or all positions. Keys and values of
attention are read at all positions, and their node is `kept`: computed once per position and cached
(Pope et al. 2022, "Efficiently scaling transformer inference", section 3.3). What depends on no
weight is computed for the whole window, as in the graph.

An operator without a rule here makes the analysis fail: its result may mix positions. That masks
hide later positions is not proved: it holds for models that `transformers` builds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from penstock.compiler.capture import Capture
from penstock.compiler.nodes import arguments_by_name, source_line, value_of
from penstock.compiler.ops import attention_at_position
from penstock.errors import CompileError

aten = torch.ops.aten


class MixedPositionsError(CompileError):
    """One position of a graph cannot be computed from keys and values of the others."""


@dataclass(frozen=True)
class One:
    """An operand at the computed position; `dim` counts its positions, None for one of several
    results."""

    node: fx.Node
    dim: int | None


@dataclass(frozen=True)
class All:
    """An operand at all positions of the window."""

    node: fx.Node


@dataclass(frozen=True)
class Computed:
    """The computed position itself, int64 [1]."""


@dataclass(frozen=True)
class Form:
    """How a node computes one position: `dim` of its result counts positions, and in `args` and
    `kwargs` every operand is a `One`, an `All` or a `Computed`. `target` is the operator, None for
    that of the node."""

    dim: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: torch._ops.OpOverload | None = None


@dataclass(frozen=True)
class PositionForms:
    """The forms of a graph's nodes, and the nodes whose results are kept for later positions."""

    window: int
    forms: Mapping[fx.Node, Form]
    kept: tuple[fx.Node, ...]


def position_forms(captured: Capture) -> PositionForms:
    """Analyse a graph that was captured for a batch of one row of positions.

    **Raises:** `MixedPositionsError` naming an operator that has no form.
    """
    return _Analysis(captured).run()


def replaced(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested arguments with `function` applied to every value that is not a container."""
    if isinstance(value, (tuple, list)):
        return type(value)(replaced(item, function) for item in value)
    if isinstance(value, dict):
        return {name: replaced(item, function) for name, item in value.items()}
    return function(value)


# Operators that compute each element by itself and have no tag that says so.
_BY_ELEMENT = {
    *(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default),
    *(aten.type_as.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default),
    *(aten.clone.default, aten.contiguous.default, aten.hardswish.default, aten.mish.default),
    *(aten.__and__.Tensor, aten.__or__.Tensor, aten.masked_fill.Tensor, aten.zeros_like.default),
    *(aten.ones_like.default, aten.full_like.default),
}
# Operators whose results are copies of elements, with the argument that has the result's sizes.
_MOVES: dict[Any, int | None] = {
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), 1),
    **dict.fromkeys((aten.expand.default,), 1),
    **dict.fromkeys(
        (
            *(aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default, aten.t.default),
            *(aten.squeeze.dim, aten.transpose.int, aten.permute.default, aten.slice.Tensor),
            *(aten.select.int, aten.split.Tensor, aten.split_with_sizes.default),
            *(aten.chunk.default, aten.unbind.int, aten.narrow.default, aten.cat.default),
            *(aten.stack.default, aten.repeat.default, aten.repeat_interleave.self_int),
            *(aten.movedim.int, aten.flip.default, aten.roll.default, aten.index_select.default),
            *(aten.swapaxes.default, aten.numpy_T.default, aten.tile.default),
        )
    ),
}
# Those that allocate their result when positions are moved, and how many elements they may have.
_COPIES = {
    *(aten.cat.default, aten.stack.default, aten.repeat.default, aten.repeat_interleave.self_int),
    *(aten.flip.default, aten.roll.default, aten.index_select.default, aten.tile.default),
}
_MOST_MOVED = 1 << 26
# Those whose arguments have the sizes of parts of a dimension.
_SIZED = {aten.narrow.default, aten.split_with_sizes.default, aten.unflatten.int}
# Operators along the dimensions that an argument names, which compute each other index by itself.
_ALONG = {
    *(aten.softmax.int, aten._softmax.default, aten._safe_softmax.default, aten.log_softmax.int),
    *(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var.dim),
    *(aten.var.correction, aten.std.dim, aten.std.correction, aten.max.dim, aten.min.dim),
    *(aten.argmax.default, aten.argmin.default, aten.linalg_vector_norm.default),
    *(aten.norm.ScalarOpt_dim, aten.logsumexp.default, aten.cumsum.default, aten.topk.default),
    *(aten.sort.default, aten.glu.default, aten.any.dim, aten.all.dim, aten.prod.dim_int),
    *(aten.layer_norm.default, aten.rms_norm.default, aten.native_layer_norm.default),
}
_PRODUCTS = {
    *(aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default),
    *(aten.addmm.default, aten.baddbmm.default),
}
_ATTENTION = aten.scaled_dot_product_attention.default


class _Analysis:
    def __init__(self, captured: Capture) -> None:
        self._graph = captured.graph
        nodes = {node.name: node for node in self._graph.find_nodes(op="placeholder")}
        self._weights = {nodes[name] for name in captured.weights if name in nodes}
        inputs = [nodes[name] for name in captured.inputs if name in nodes]
        self._inputs = set(inputs)
        self._window = _window_of(inputs)
        self._forms: dict[fx.Node, Form] = {}
        self._kept: dict[fx.Node, None] = {}
        self._moves: dict[str, int | None] = {}  # equal ones of other layers

    def run(self) -> PositionForms:
        of_weights, of_inputs = set(self._weights), set(self._inputs)
        for node in self._graph.nodes:
            if node.op != "call_function":
                continue
            if any(source in of_inputs for source in node.all_input_nodes):
                of_inputs.add(node)
            if any(source in of_weights for source in node.all_input_nodes):
                of_weights.add(node)
                form = self._form(node)
                if form is not None:
                    self._forms[node] = form
                elif node in of_inputs:
                    raise self._mixed(node)
        (output,) = self._graph.find_nodes(op="output")
        for result in output.args[0]:
            if result not in self._forms:
                raise self._mixed(result)
        order = {node: place for place, node in enumerate(self._graph.nodes)}
        kept = tuple(sorted(self._kept, key=order.__getitem__))
        return PositionForms(self._window, self._forms, kept)

    def _mixed(self, node: fx.Node) -> MixedPositionsError:
        return MixedPositionsError(
            f"{source_line(node)}: {node.target} may mix positions of a text other than as "
            "attention does"
        )

    def _form(self, node: fx.Node) -> Form | None:
        """Return the form of a node that depends on weights; None if there is no rule."""
        target = node.target
        if target is aten.embedding.default:
            return self._embedding(node)
        if not any(source in self._forms for source in node.all_input_nodes):
            return None
        if target is operator.getitem:
            dim = self._forms[node.args[0]].dim  # type: ignore[index]
            return Form(dim, (One(node.args[0], None), node.args[1]))  # type: ignore[arg-type]
        if not isinstance(target, torch._ops.OpOverload):
            return None
        if torch.Tag.pointwise in target.tags or target in _BY_ELEMENT:
            return self._by_element(node)
        if target in _MOVES:
            return self._moved(node)
        if target in _ALONG:
            return self._along(node)
        if target in _PRODUCTS:
            return self._product(node)
        if target is aten.index.Tensor:
            return self._indexed(node)
        return self._attention(node) if target is _ATTENTION else None

    def _dim(self, node: fx.Node) -> int | None:
        return self._forms[node].dim if node in self._forms else None

    def _one(self, node: Any) -> Any:
        """Return an operand at one position; what is no operand with positions stays."""
        return One(node, self._dim(node)) if node in self._forms else All(node)

    def _embedding(self, node: fx.Node) -> Form | None:
        """Return the form of a lookup: its indices have one dimension of the window's length."""
        weight, indices, *options = node.args
        if not isinstance(indices, fx.Node):
            return None
        dims = [d for d, size in enumerate(value_of(indices).shape) if size == self._window]
        dim = self._dim(indices)
        if dim is None and len(dims) == 1:
            (dim,) = dims
        if dim is None or weight in self._forms:
            return None
        return Form(dim, (All(weight), One(indices, dim), *options), dict(node.kwargs))  # type: ignore[arg-type]

    def _by_element(self, node: fx.Node) -> Form | None:
        if not isinstance(node.meta["val"], torch.Tensor):
            return None
        rank = value_of(node).dim()
        dims = {
            rank - value_of(source).dim() + self._forms[source].dim
            for source in node.all_input_nodes
            if source in self._forms
        }
        if len(dims) != 1:
            return None
        (dim,) = dims
        args, kwargs = (replaced(part, self._aligned(rank, dim)) for part in _arguments(node))
        return Form(dim, args, kwargs)

    def _aligned(self, rank: int, dim: int) -> Callable[[Any], Any]:
        """Return the operands of a broadcast whose result has `rank` dimensions, at one position
        in `dim`."""

        def operand(value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            own = dim - (rank - value_of(value).dim())
            if value in self._forms or own < 0 or value_of(value).shape[own] == 1:
                return self._one(value)
            return One(value, own)

        return operand

    def _moved(self, node: fx.Node) -> Form | None:
        """Return the form of a view or a copy: find the dimension in which its result has the
        positions of its operands in order, by moving the positions themselves."""
        beside = [source for source in node.all_input_nodes if source not in self._forms]
        if beside and node.target is not aten.cat.default:
            return None
        if node.target is aten.roll.default and not arguments_by_name(node).get("dims"):
            return None  # the shift is that of the flattened window
        if node.target in _SIZED and self._is_along_positions(node):
            return None

        def described(value: Any) -> Any:
            known = isinstance(value, fx.Node)
            return (tuple(value_of(value).shape), self._dim(value)) if known else value

        key = repr((node.target, [replaced(part, described) for part in _arguments(node)]))
        if key not in self._moves:
            self._moves[key] = self._moved_dim(node)
        dim = self._moves[key]
        if dim is None:
            return None
        place = _MOVES[node.target]
        rank = next(_tensors(node.meta["val"])).dim()
        ones = list(replaced(node.args, self._aligned(rank, dim)))
        if place is not None:
            sizes = list(value_of(node).shape)
            sizes[dim] = 1
            ones[place:] = [sizes, *ones[place + 1 :]]
        return Form(dim, tuple(ones), dict(node.kwargs))

    def _is_along_positions(self, node: fx.Node) -> bool:
        """Return whether the dimension that a view's arguments name counts positions."""
        value: Any = node.args[0]
        dim: Any = arguments_by_name(node).get("dim", 0)
        return dim % value_of(value).dim() == self._forms[value].dim

    def _moved_dim(self, node: fx.Node) -> int | None:
        first = next(source for source in node.all_input_nodes if source in self._forms)

        def positions(value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            dim = self._forms.get(value, self._forms[first]).dim
            return _positions(value_of(value).shape, dim)

        if (
            node.target in _COPIES
            and max(t.numel() for t in _tensors(node.meta["val"])) > _MOST_MOVED
        ):
            return None
        args, kwargs = (replaced(part, positions) for part in _arguments(node))
        try:
            moved = node.target(*args, **kwargs)  # type: ignore[operator]
        except RuntimeError:  # a view that merges positions with another dimension
            return None
        dims = {_position_dim(each, self._window) for each in _tensors(moved)}
        return dims.pop() if len(dims) == 1 else None

    def _along(self, node: fx.Node) -> Form | None:
        given = arguments_by_name(node)
        schema = {a.name: a.default_value for a in node.target._schema.arguments}  # type: ignore[union-attr]
        value = node.args[0]
        if not isinstance(value, fx.Node) or value not in self._forms:
            return None
        rank, dim = value_of(value).dim(), self._forms[value].dim
        if "normalized_shape" in given:
            along = set(range(rank - len(given["normalized_shape"]), rank))
        else:
            named = given.get("dim", schema["dim"])
            if named is None or named == []:
                return None
            along = {d % rank for d in (named if isinstance(named, (list, tuple)) else [named])}
        others = [n for n in node.all_input_nodes if n is not value]
        if dim in along or any(other in self._forms for other in others):
            return None
        left = next(_tensors(node.meta["val"])).dim()
        after = dim - sum(d < dim for d in along) if left < rank else dim
        args, kwargs = (
            replaced(part, lambda v: self._one(v) if isinstance(v, fx.Node) else v)
            for part in _arguments(node)
        )
        return Form(after, args, kwargs)

    def _indexed(self, node: fx.Node) -> Form | None:
        """Return the form of an index along one dimension, such as `heads[..., [-1], :]`."""
        value: Any = node.args[0]
        indices: Any = node.args[1]
        given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        if len(given) != 1 or value not in self._forms:
            return None
        ((along, index),) = given
        dim = self._forms[value].dim
        if along == dim or index in self._forms or value_of(index).dim() != 1:
            return None
        return Form(dim, (self._one(value), [a if a is None else All(a) for a in indices]))

    def _product(self, node: fx.Node) -> Form | None:
        """Return the form of a matrix product: its left operand has positions in its rows, and
        those of its right operand, if any, are summed or are columns."""
        added = node.target in (aten.addmm.default, aten.baddbmm.default)
        operands = [a for a in node.args if isinstance(a, fx.Node)]
        left, right = operands[1:3] if added else operands[:2]
        dim, rank = self._dim(left), value_of(left).dim()
        if dim is None or dim == rank - 1 or rank < 2 or left is right:
            return None
        if value_of(right).dim() < 2:
            return None
        if node.target is aten.linear.default and right in self._forms:
            return None
        if right in self._forms:
            if dim != rank - 2 or self._forms[right].dim < value_of(right).dim() - 2:
                return None
            self._keep(right)
        elif dim != rank - 2 and value_of(right).dim() > 2:  # of a batch of matrices
            return None
        out = value_of(node).dim()
        after = out - (rank - dim)

        def operand(value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            if value is left:
                return self._one(value)
            return All(value) if value is right else self._aligned(out, after)(value)

        args, kwargs = (replaced(part, operand) for part in _arguments(node))
        return Form(after, args, kwargs)

    def _attention(self, node: fx.Node) -> Form | None:
        given = arguments_by_name(node)
        query, key, value = given["query"], given["key"], given["value"]
        rank = value_of(query).dim()
        if any(self._dim(n) != value_of(n).dim() - 2 for n in (query, key, value)):
            return None
        mask: Any = given.get("attn_mask")
        if mask is None and not given.get("is_causal", False):
            return None  # every position reads all
        if mask is not None:
            mask = self._aligned(rank, rank - 2)(mask)
            if isinstance(mask, One) and mask.dim != value_of(mask.node).dim() - 2:
                return None
        self._keep(key)
        self._keep(value)
        options = (given.get("scale"), given.get("enable_gqa", False))
        operands = (One(query, rank - 2), All(key), All(value), mask, Computed())
        return Form(rank - 2, (*operands, *options), target=attention_at_position)

    def _keep(self, node: fx.Node) -> None:
        """Keep the results of a node, or of the smaller one that it repeats (heads that share
        keys)."""
        best = at = node
        while at.target in _MOVES or at.target in _BY_ELEMENT:
            sources = at.all_input_nodes
            if len(sources) != 1 or not isinstance(sources[0].meta["val"], torch.Tensor):
                break
            at = sources[0]
            if at not in self._forms:
                break
            if value_of(at).nbytes < value_of(best).nbytes:
                best = at
        self._kept[best] = None


def _window_of(inputs: list[fx.Node]) -> int:
    for node in inputs:
        if value_of(node).dim() == 2 and value_of(node).shape[0] == 1:
            return int(value_of(node).shape[1])
    raise MixedPositionsError("no input of the model is one row of tokens")


def _arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return node.args, dict(node.kwargs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)


def _positions(shape: Sequence[int], dim: int) -> torch.Tensor:
    """Return a tensor in which every element is its index in a dimension."""
    sizes = [1] * len(shape)
    sizes[dim] = shape[dim]
    return torch.arange(shape[dim], dtype=torch.int32).view(sizes).expand(*shape)


def _position_dim(moved: torch.Tensor, window: int) -> int | None:
    """Return the dimension whose index is every element's value; None if there is none."""
    dims = [dim for dim, size in enumerate(moved.shape) if size == window]
    return next((d for d in dims if torch.equal(moved, _positions(moved.shape, d))), None)
