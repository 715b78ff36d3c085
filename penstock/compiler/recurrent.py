"""Recurrent networks, layer by layer.

`nn.LSTM`, `nn.GRU` and `nn.RNN` are one operator for all layers, which draws random numbers between
them. A program has an operator for each layer (`recurrent_layer.py`), and keyed dropout between.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from penstock.compiler.nodes import arguments_by_name, insert_call

aten = torch.ops.aten

_MODES = {
    aten.lstm.input: "lstm",
    aten.gru.input: "gru",
    aten.rnn_tanh.input: "rnn_tanh",
    aten.rnn_relu.input: "rnn_relu",
}


def divide_recurrent(graph: fx.Graph) -> None:
    """Replace recurrent networks by their layers."""
    for target, mode in _MODES.items():
        for node in graph.find_nodes(op="call_function", target=target):
            _divide(graph, node, mode)


def _divide(graph: fx.Graph, node: fx.Node, mode: str) -> None:
    given = arguments_by_name(node)
    layers, directions = given["num_layers"], 2 if given["bidirectional"] else 1
    size = len(given["params"]) // layers
    options = given["has_biases"], given["bidirectional"]
    first = given["hx"] if isinstance(given["hx"], (list, tuple)) else [given["hx"]]
    with graph.inserting_before(node):

        def call(target: Callable[..., Any], *args: Any) -> fx.Node:
            return insert_call(graph, node, target, args)

        values = given["input"]
        if given["batch_first"]:
            values = call(aten.transpose.int, values, 0, 1)
        last: list[list[fx.Node]] = []
        for layer in range(layers):
            if layer and given["dropout"]:
                values = call(aten.dropout.default, values, given["dropout"], given["train"])
            begin, end = layer * directions, (layer + 1) * directions
            states = [call(aten.slice.Tensor, state, 0, begin, end) for state in first]
            weights = list(given["params"][layer * size : (layer + 1) * size])
            made = call(
                torch.ops.penstock.recurrent_layer.default,
                *(mode, values, states, weights, *options),
            )
            values, *ends = (call(operator.getitem, made, i) for i in range(1 + len(first)))
            last.append(ends)
        if given["batch_first"]:
            values = call(aten.transpose.int, values, 0, 1)
        results = [values, *(call(aten.cat.default, list(e)) for e in zip(*last, strict=True))]
    for user in list(node.users):
        user.replace_all_uses_with(results[int(user.args[1])])  # type: ignore[arg-type]
        graph.erase_node(user)
    graph.erase_node(node)
