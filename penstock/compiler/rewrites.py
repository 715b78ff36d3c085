"""Rewrites of the captured graph, before autograd sees it. Each preserves the computed function.

- recurrent networks become their layers (`recurrent.py`);
- composed activations become the fused operator (`recognise.py` proves them equal);
- a linear layer that feeds only a cross-entropy becomes one operator (`fused_head.py`);
- dropout is keyed, so that replay and recomputation use the same bits (`keyed_dropout.py`);
- in-place writes become new values, since a stage may not write its inputs (`functional.py`).
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from penstock.compiler import ops  # noqa: F401  (registers the penstock operators)
from penstock.compiler.capture import Capture
from penstock.compiler.functional import functionalise, writes
from penstock.compiler.nodes import (
    arguments_by_name,
    erase_unused,
    insert_call,
    source_line,
    value_of,
)
from penstock.compiler.recognise import fuse_activations
from penstock.compiler.recurrent import divide_recurrent
from penstock.errors import CompileError

aten = torch.ops.aten
KEY = "penstock_key"

_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_PASS_THROUGH = {aten.alias.default, aten.contiguous.default}
_CHECKS = {aten._assert_tensor_metadata.default}
_OF_CHANNELS = {aten.feature_dropout.default, aten.feature_dropout_.default}
_KEYED = {aten.dropout.default, aten.dropout_.default, *_OF_CHANNELS}
_DROPOUTS = {
    *_KEYED,
    *(aten.alpha_dropout.default, aten.alpha_dropout_.default),
    *(aten.feature_alpha_dropout.default, aten.feature_alpha_dropout_.default),
}
_SUM = 2  # the reduction code of aten losses: 0 none, 1 mean, 2 sum
_MEAN = 1
_NUMBER = 2  # index of the argument of a keyed dropout that is its number in the model


def rewrite(captured: Capture) -> Capture:
    """Apply every rewrite; return the capture with its new graph, which reads a dropout key."""
    graph = captured.graph
    _refuse_regions(graph)
    _drop_checks(graph)
    _refuse_values(graph)
    divide_recurrent(graph)
    _key_dropouts(graph, _key_placeholder(graph))
    captured = functionalise(captured)
    graph = captured.graph
    _ask_for_dense_gradients(graph)
    fuse_activations(graph)
    fuse_heads(graph)
    _number_dropouts(graph)
    _refuse_random(graph)
    graph.eliminate_dead_code()  # also checks the order of the nodes, once
    return captured


def key_of(graph: fx.Graph) -> fx.Node:
    """Return the dropout key of a rewritten graph."""
    (key,) = (n for n in graph.find_nodes(op="placeholder") if n.name == KEY)
    return key


def share_equal(graph: fx.Graph, among: set[fx.Node]) -> set[fx.Node]:
    """Merge equal operators of the prelude (models compute rotary tables once per layer).

    Returns the nodes of `among` that remain.
    """
    seen: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node not in among:
            continue
        key = (node.target, repr((node.args, node.kwargs)))
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node
    return set(seen.values())


def _refuse_regions(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "get_attr" or isinstance(node.target, torch._ops.HigherOrderOperator):
            what = node.target if node.op == "get_attr" else node.target.name()
            raise CompileError(
                f"{source_line(node)} uses control flow inside the graph ({what}), which Penstock "
                "does not compile: use torch.where, or make the decision outside the model."
            )
        if (getattr(node.target, "__module__", None) or "").startswith("torch._functorch"):
            raise CompileError(
                f"{source_line(node)} uses a transform of torch.func (torch.vmap, jvp), which "
                "Penstock does not compile: write the operators for the whole batch."
            )


def _drop_checks(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target in _CHECKS:
            graph.erase_node(node)
    erase_unused(graph)


def _refuse_values(graph: fx.Graph) -> None:
    """Reject numbers and shapes that depend on the values of tensors."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not all(isinstance(n, int) for n in value.shape):
            raise CompileError(
                f"{source_line(node)} makes a tensor whose shape depends on values "
                f"({node.target}), which no ahead-of-time graph can hold: use torch.where or a "
                "mask instead."
            )
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CompileError(
                f"{source_line(node)} takes a number out of a tensor ({node.target}), which no "
                "ahead-of-time graph can hold: compute with the tensor itself, without .item() or "
                ".tolist()."
            )


def _ask_for_dense_gradients(graph: fx.Graph) -> None:
    """Turn off `sparse` of an embedding: it chooses the layout of a gradient, and the store's are
    dense."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            for place, argument in enumerate(node.target._schema.arguments):
                if argument.name in ("sparse", "sparse_grad") and place < len(node.args):
                    node.update_arg(place, False)
                elif argument.name in ("sparse", "sparse_grad") and argument.name in node.kwargs:
                    node.update_kwarg(argument.name, False)


def fuse_heads(graph: fx.Graph) -> int:
    """Fuse `cross_entropy(linear(h, W, b))` into one chunked operator; return how many."""
    fused = 0
    for node in list(graph.nodes):
        if node.target is aten.cross_entropy_loss.default and _fuse_head(graph, node):
            fused += 1
    erase_unused(graph)
    return fused


def _fuse_head(graph: fx.Graph, loss: fx.Node) -> bool:
    arguments = arguments_by_name(loss)
    if arguments.get("weight") is not None or arguments.get("label_smoothing", 0.0):
        return False
    reduction = arguments.get("reduction", _MEAN)
    labels = arguments["target"]
    if reduction not in (_SUM, _MEAN) or value_of(labels).dtype != torch.int64:
        return False
    logits = arguments["self"]
    if value_of(logits).dim() != 2:
        return False
    vocabulary = value_of(logits).shape[-1]
    prediction = _prediction_beside(loss, logits)
    at: fx.Node = logits
    while at.target is not aten.linear.default:
        only = len(at.users) == 1 or (at is logits and prediction is not None)
        keeps_rows = value_of(at).shape[-1] == vocabulary
        casts = at.target in (aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout)
        if not (only and keeps_rows and (at.target in _VIEWS | _PASS_THROUGH or casts)):
            return False
        at = at.all_input_nodes[0]
    linear = arguments_by_name(at)
    hidden, weight = linear["input"], linear["weight"]
    only = len(at.users) == 1 or (at is logits and prediction is not None)
    if not only or value_of(weight).shape[0] != vocabulary:
        return False
    with graph.inserting_before(loss):
        flat = insert_call(
            graph, loss, aten.reshape.default, (hidden, [-1, value_of(hidden).shape[-1]])
        )
        ignore = arguments.get("ignore_index", -100)
        operands = (flat, weight, linear.get("bias"), labels, ignore)
        fused = torch.ops.penstock
        if prediction is None:
            total = insert_call(graph, loss, fused.linear_cross_entropy.default, operands)
        else:
            both = insert_call(
                graph, loss, fused.linear_cross_entropy_predictions.default, operands
            )
            total = insert_call(graph, loss, operator.getitem, (both, 0))
            likeliest = insert_call(graph, loss, operator.getitem, (both, 1))
            prediction.replace_all_uses_with(likeliest)
        result = total
        if reduction == _MEAN:
            kept = insert_call(graph, loss, aten.ne.Scalar, (labels, ignore))
            count = insert_call(graph, loss, aten.sum.default, (kept,))
            result = insert_call(graph, loss, aten.div.Tensor, (total, count))
        if value_of(loss).dtype != torch.float32:
            result = insert_call(graph, loss, aten.to.dtype, (result, value_of(loss).dtype))
    loss.replace_all_uses_with(result)
    return True


def _prediction_beside(loss: fx.Node, logits: fx.Node) -> fx.Node | None:
    """Return the `argmax` over the vocabulary, after the loss, if it is the only other reader of
    the logits.

    An evaluation program contains it (`models/task_losses.py`).
    """
    others = [node for node in logits.users if node is not loss]
    if len(others) != 1 or others[0].target is not aten.argmax.default or others[0] < loss:
        return None
    arguments = arguments_by_name(others[0])
    over_vocabulary = arguments.get("dim") in (1, -1) and not arguments.get("keepdim", False)
    return others[0] if over_vocabulary else None


def _key_placeholder(graph: fx.Graph) -> fx.Node:
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        key = graph.placeholder(KEY)
    with value_of(first).fake_mode:  # type: ignore[attr-defined]
        key.meta["val"] = torch.empty(2, dtype=torch.int64)
    return key


def _key_dropouts(graph: fx.Graph, key: fx.Node) -> None:
    """Key every dropout, of elements or of channels. A dropout of any kind with probability 0 is
    replaced by its argument, as in PyTorch."""
    for node in list(graph.nodes):
        if node.target in _DROPOUTS:
            value, probability, training = _dropout_arguments(node)
            if not training or probability == 0.0:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
                continue
            if node.target not in _KEYED:  # refused below
                continue
            with graph.inserting_before(node):
                keyed = _keyed_dropout(graph, node, value, key, probability)
            if writes(node):  # as any other write, for `functionalise`
                node.target, node.args, node.kwargs = aten.copy_.default, (value, keyed), {}
                continue
            node.replace_all_uses_with(keyed)
            graph.erase_node(node)
        elif node.target is aten.scaled_dot_product_attention.default and arguments_by_name(
            node
        ).get("dropout_p", 0.0):
            _expand_attention(graph, node, key)
    erase_unused(graph)


def _keyed_dropout(
    graph: fx.Graph, node: fx.Node, value: fx.Node, key: fx.Node, probability: float
) -> fx.Node:
    def call(target: Callable[..., Any], *args: Any, **options: Any) -> fx.Node:
        return insert_call(graph, node, target, args, options)

    keyed = torch.ops.penstock.dropout.default
    if node.target not in _OF_CHANNELS:
        return call(keyed, value, key, 0, probability)
    like = value_of(value)
    shape = [*like.shape[:2], *(1 for _ in like.shape[2:])]
    ones = call(aten.ones.default, shape, dtype=like.dtype, device=like.device)
    return call(aten.mul.Tensor, value, call(keyed, ones, key, 0, probability))


def _number_dropouts(graph: fx.Graph) -> None:
    """Number the dropouts 0, 1, ... in the order of the model, before it is cut."""
    for number, node in enumerate(_dropouts(graph)):
        node.update_arg(_NUMBER, number)


def _dropout_arguments(node: fx.Node) -> tuple[fx.Node, float, bool]:
    arguments = arguments_by_name(node)
    value = arguments["input"] if "input" in arguments else arguments["self"]
    return value, float(arguments["p"]), bool(arguments["train"])


def _expand_attention(graph: fx.Graph, node: fx.Node, key: fx.Node) -> None:
    """Expand attention with dropout: the fused operator draws its own bits, which are not
    reproducible."""
    arguments = arguments_by_name(node)
    query, keys, values = arguments["query"], arguments["key"], arguments["value"]
    mask, scale = arguments.get("attn_mask"), arguments.get("scale")
    head_width = value_of(query).shape[-1]
    with graph.inserting_before(node):

        def call(target: Callable[..., Any], *args: Any) -> fx.Node:
            return insert_call(graph, node, target, args)

        if arguments.get("enable_gqa", False):
            groups = value_of(query).shape[-3] // value_of(keys).shape[-3]
            keys = call(aten.repeat_interleave.self_int, keys, groups, -3)
            values = call(aten.repeat_interleave.self_int, values, groups, -3)
        scaled = call(aten.mul.Tensor, query, head_width**-0.5 if scale is None else scale)
        scores = call(aten.matmul.default, scaled, call(aten.transpose.int, keys, -2, -1))
        if arguments.get("is_causal", False):
            length, width = value_of(query).shape[-2], value_of(arguments["key"]).shape[-2]
            device = value_of(query).device
            options = {"dtype": torch.bool, "device": device}
            ones = insert_call(graph, node, aten.ones.default, ([length, width],), options)
            mask = call(aten.tril.default, ones)
        if mask is not None:
            if value_of(mask).dtype == torch.bool:
                hidden = call(aten.logical_not.default, mask)
                scores = call(aten.masked_fill.Scalar, scores, hidden, float("-inf"))
            else:
                scores = call(aten.add.Tensor, scores, mask)
        weights = call(aten._safe_softmax.default, scores, -1)
        dropped = call(
            torch.ops.penstock.dropout.default, weights, key, 0, float(arguments["dropout_p"])
        )
        result = call(aten.matmul.default, dropped, values)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _dropouts(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target is torch.ops.penstock.dropout.default]


def count_dropouts_from_first(graph: fx.Graph) -> int:
    """Number a stage's dropouts relative to its first dropout; return the first dropout's number.

    Stages that differ only in their place in the model then share a kind.
    """
    found = _dropouts(graph)
    first = min((int(node.args[_NUMBER]) for node in found), default=0)  # type: ignore[arg-type]
    for node in found:
        node.update_arg(_NUMBER, int(node.args[_NUMBER]) - first)  # type: ignore[arg-type]
    return first


def _refuse_random(graph: fx.Graph) -> None:
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            continue
        if torch.Tag.nondeterministic_seeded in target.tags and target.namespace == "aten":
            if target is aten.scaled_dot_product_attention.default:
                continue  # random only through its dropout, which was removed above
            raise CompileError(
                f"{source_line(node)} draws random numbers with {target}, which a replayed step "
                "could not repeat; use torch.nn.Dropout, or pass the random values as an input."
            )
