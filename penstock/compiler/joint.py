"""From a stage's forward graph to its executables: trace the joint graph, then divide it.

Autograd is traced once per kind over fake tensors; the result is a graph with the operators of
forward and backward. Values that the backward needs are *saved*, except values that depend on
weights or the dropout key alone: these are recomputed from the weights, which are streamed a second
time. A saved value is therefore never a weight or a view of one. A value is also not saved if a few
passes over memory recompute it from other saved values, such as a GELU from its argument
(`recompute_cheap.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from penstock.compiler import sparse_lowering
from penstock.compiler.activation_calls import lower_activations
from penstock.compiler.attention_calls import lower_attention
from penstock.compiler.cached_attention import lower_writes
from penstock.compiler.counted_costs import operator_costs, total_flops, weight_flops
from penstock.compiler.executables import executable
from penstock.compiler.joint_tracing import StageSignature, trace_joint
from penstock.compiler.peak_bytes import peak_bytes
from penstock.compiler.product_libraries import Products
from penstock.compiler.recompute_cheap import keep_costly, make_late
from penstock.compiler.sparse_lowering import mark_sparse
from penstock.compiler.tensors import storage_of
from penstock.compiler.weight_products import (
    descendants,
    forget_weight_products,
    mark_weight_products,
)
from penstock.errors import ProgramError
from penstock.program import Kind, SavedTensor, SparseUse, TensorSpec

penstock = torch.ops.penstock


def make_kind(
    name: str,
    digest: str,
    graph: fx.Graph,
    signature: StageSignature,
    device: str,
    products: Products,
) -> Kind:
    """Compile one stage's forward graph into a kind.

    **Arguments:** `graph` takes (*weights, *inputs, key) and returns its outputs as a tuple, in
    ATen operators before autograd; `device` is the engine's device ("cpu", "cuda"); `products` is
    the library for products of large float32 matrices.
    """
    joint, outputs, outputs_grad = trace_joint(graph, signature, device, products)
    mark_sparse(joint, dict(signature.sparse))
    parts = _Parts.of(joint, signature, len(outputs), sum(outputs_grad))
    mark_weight_products(joint, parts.weights, [*parts.inputs, parts.key], parts.tangents)
    needs_backward = any(outputs_grad)
    saved_nodes = _saved_nodes(parts) if needs_backward else []
    forward = _extract(
        joint, parts.weights + parts.inputs + [parts.key], parts.outputs + saved_nodes
    )
    infer = _extract(joint, parts.weights + parts.inputs + [parts.key], parts.outputs)
    backward, backward_weights = _backward(parts, saved_nodes)
    everything = parts.weights + parts.inputs + [parts.key] + parts.tangents
    recompute = _fuse_turns(_extract(joint, everything, parts.gradients))
    turn = _fuse_turns(_extract(joint, everything, parts.outputs + parts.gradients))
    graphs = {
        "forward": forward,
        "infer": infer,
        "backward": backward,
        "recompute": recompute,
        "turn": turn,
    }
    costs = {key: operator_costs(g) for key, g in graphs.items()}
    forward_flops, turn_flops = total_flops(costs["infer"]), total_flops(costs["turn"])
    peaks = {key: peak_bytes(g, products) for key, g in graphs.items()}
    draws_dropout = bool(_calls(infer, penstock.dropout.default))
    sparse = _with_flops(signature.sparse, turn)
    for lowered in graphs.values():
        _lower(lowered, products)
    modules = {key: executable(g, f"{key}_{name}") for key, g in graphs.items()}
    return Kind(
        name=name,
        digest=digest,
        weights=signature.weights,
        trainable=signature.trainable,
        inputs=signature.inputs,
        inputs_grad=signature.inputs_grad,
        outputs=tuple(outputs),
        outputs_grad=tuple(outputs_grad),
        saved=tuple(_saved_specs(parts, saved_nodes) if needs_backward else ()),
        backward_weights=tuple(backward_weights),
        forward=modules["forward"],
        infer=modules["infer"],
        backward=modules["backward"],
        recompute=modules["recompute"],
        turn=modules["turn"],
        draws_dropout=draws_dropout,
        forward_flops=forward_flops,
        backward_flops=max(0, turn_flops - forward_flops) if needs_backward else 0,
        forward_transient_bytes=peaks["forward"],
        backward_transient_bytes=peaks["backward"],
        recompute_transient_bytes=peaks["recompute"],
        turn_transient_bytes=peaks["turn"],
        sparse=sparse,
        graphs=graphs,
        costs=costs,
    )


def computes_gradients(kind: Kind) -> bool:
    """Return whether a backward of the kind computes any gradient; else it returns None for each:
    all outputs of its stages are detached."""
    return any(value is not None for value in _output_args(kind.graphs["recompute"]))


def _with_flops(sparse: Sequence[tuple[int, SparseUse]], turn: fx.Graph) -> dict[int, SparseUse]:
    """Return the sparse weights of a kind, with the operations of their products in `turn`."""
    weights = turn.find_nodes(op="placeholder")
    return {
        position: replace(use, flops=weight_flops(weights[position])) for position, use in sparse
    }


def _lower(graph: fx.Graph, products: Products) -> None:
    """Let nodes call what an engine has for them. Costs of sparse weights are counted before."""
    forget_weight_products(graph)
    sparse_lowering.lower(graph)
    lower_activations(graph)
    lower_attention(graph, products)
    lower_writes(graph)


@dataclass
class _Parts:
    """The joint graph's nodes by role."""

    graph: fx.Graph
    weights: list[fx.Node]
    inputs: list[fx.Node]
    key: fx.Node
    tangents: list[fx.Node]
    outputs: list[fx.Node]
    gradients: list[fx.Node | None]

    @classmethod
    def of(cls, graph: fx.Graph, signature: StageSignature, outputs: int, tangents: int) -> _Parts:
        given = [n for n in graph.nodes if n.op == "placeholder"]
        w, i = len(signature.weights), len(signature.inputs)
        returned = list(_output_args(graph))
        if len(given) != w + i + 1 + tangents:
            raise ProgramError(f"joint graph takes {len(given)} values, not {w + i + 1 + tangents}")
        return cls(
            graph,
            given[:w],
            given[w : w + i],
            given[w + i],
            given[w + i + 1 :],
            returned[:outputs],
            returned[outputs:],
        )


def _output_args(graph: fx.Graph) -> Sequence[Any]:
    (output,) = [n for n in graph.nodes if n.op == "output"]
    args = output.args[0]
    return args if isinstance(args, (tuple, list)) else (args,)


def _saved_nodes(parts: _Parts) -> list[fx.Node]:
    """Return the forward values that the backward needs and cannot cheaply recompute."""
    backward = descendants(parts.graph, parts.tangents)
    from_inputs = descendants(parts.graph, parts.inputs)
    wanted: dict[fx.Node, None] = {}
    inputs: set[fx.Node] = set()

    def need(node: fx.Node) -> None:
        if node in backward or node in wanted:
            return
        if node in from_inputs:
            if node in parts.inputs:
                inputs.add(node)
            if node.op == "call_function":
                if isinstance(node.meta["val"], torch.Tensor):
                    wanted[node] = None
                else:
                    for source in node.all_input_nodes:
                        need(source)
            return
        for source in node.all_input_nodes:
            need(source)

    for node in parts.graph.nodes:
        if node in backward and node.op == "call_function":
            for source in node.all_input_nodes:
                need(source)
    for gradient in parts.gradients:
        if gradient is not None:
            need(gradient)
    free = {node for node in parts.graph.nodes if node not in from_inputs}
    return keep_costly(list(wanted), free | inputs)


def _backward(parts: _Parts, saved: Sequence[fx.Node]) -> tuple[fx.Graph, list[int]]:
    """Return the backward graph and the indices of the weights that it reads."""
    everything = [*parts.weights, *parts.inputs, *saved, *parts.tangents, parts.key]
    full = _extract(parts.graph, everything, parts.gradients)
    read = {n.name for n in full.nodes if n.op == "placeholder" and n.users}
    for gradient in parts.gradients:
        if gradient is not None and gradient.op == "placeholder":
            read.add(gradient.name)
    weights = [i for i, n in enumerate(parts.weights) if n.name in read]
    inputs = [n for n in parts.inputs if n.name in read]
    taken = [
        *(parts.weights[i] for i in weights),
        *inputs,
        *saved,
        *parts.tangents,
        parts.key,
    ]
    backward = _extract(parts.graph, taken, parts.gradients)
    return make_late(backward, [tangent.name for tangent in parts.tangents]), weights


def _saved_specs(parts: _Parts, saved: Sequence[fx.Node]) -> list[SavedTensor]:
    """Describe the saved values of the backward: first the inputs that it reads, then the saved
    tensors."""
    backward, _ = _backward(parts, saved)
    given = [n.name for n in backward.nodes if n.op == "placeholder"]
    specs: list[SavedTensor] = []
    inputs = {storage_of(node.meta["val"]): position for position, node in enumerate(parts.inputs)}
    known = set(inputs)
    weights = {storage_of(node.meta["val"]) for node in parts.weights}
    for position, node in enumerate(parts.inputs):
        if node.name in given:
            specs.append(SavedTensor(_spec(node), input=position))
    for node in saved:
        storage = storage_of(node.meta["val"])
        if storage in weights:
            raise ProgramError(f"saved value {node.name} is a view of a weight")
        whole = node.meta["val"].untyped_storage().nbytes()
        own = 0 if storage in known else whole
        specs.append(SavedTensor(_spec(node), bytes=own, view_of=inputs.get(storage)))
        known.add(storage)
    return specs


def _spec(node: fx.Node) -> TensorSpec:
    value = node.meta["val"]
    return TensorSpec(tuple(value.shape), value.dtype)


def _extract(
    graph: fx.Graph, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node | None]
) -> fx.Graph:
    """Copy the part of `graph` that computes `outputs` from `inputs` into a new graph."""
    new = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        made[node] = new.placeholder(node.name)
        made[node].meta = dict(node.meta)
    wanted: set[fx.Node] = set()
    stack = [n for n in outputs if n is not None]
    while stack:
        node = stack.pop()
        if node in made or node in wanted:
            continue
        wanted.add(node)
        stack.extend(node.all_input_nodes)
    for node in graph.nodes:
        if node not in wanted:
            continue
        if node.op == "placeholder":
            raise ProgramError(f"{node.name} is needed but not given to this part of the graph")
        made[node] = new.node_copy(node, lambda n: made[n])
    new.output(tuple(None if n is None else made[n] for n in outputs))
    return new


def _fuse_turns(graph: fx.Graph) -> fx.Graph:
    """If one graph contains the head's loss and its gradients, compute them in one pass."""
    fused = False
    for backward in _calls(graph, penstock.linear_cross_entropy_backward.default):
        scale, *rest = backward.args
        for forward in _calls(graph, penstock.linear_cross_entropy.default):
            if list(forward.args) != rest[:5] or scale in descendants(graph, [forward]):
                continue
            with graph.inserting_before(backward):
                turn = graph.call_function(
                    penstock.linear_cross_entropy_turn.default, backward.args, dict(backward.kwargs)
                )
                turn.meta = dict(backward.meta)
                turn.meta["val"] = [forward.meta["val"], *backward.meta["val"]]
                loss = graph.call_function(operator.getitem, (turn, 0))
                loss.meta = dict(forward.meta)
            for item in list(backward.users):
                item.args = (turn, int(item.args[1]) + 1)  # type: ignore[arg-type]
            forward.replace_all_uses_with(loss)
            graph.erase_node(backward)
            graph.erase_node(forward)
            fused = True
            break
    return _in_order(graph) if fused else graph


def _calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is target]


def _in_order(graph: fx.Graph) -> fx.Graph:
    """Copy a graph so that every node follows its arguments, otherwise in the same order."""
    new = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> None:
        if node in made:
            return
        for source in node.all_input_nodes:
            copy(source)
        made[node] = new.node_copy(node, lambda n: made[n])

    for node in graph.nodes:
        copy(node)
    return new
