"""Replaces operators that access memory by strides by reads and writes of elements by index.

A value that crosses stages is stored again, and an engine may use another memory layout. PyTorch's
derivative of `as_strided_scatter` is also wrong: elements that are not written get no gradient.
"""

from typing import Any

import torch
from torch import fx

from penstock.compiler.nodes import arguments_by_name, insert_call, source_line, value_of
from penstock.errors import CompileError

aten = torch.ops.aten
_BY_STRIDES = {
    aten.as_strided.default,
    aten.as_strided_.default,
    aten.as_strided_scatter.default,
}


def refuse_strides_of_others(graph: fx.Graph) -> None:
    """Reject strides on a tensor that is not contiguous in a storage of its own.

    **Raises:** `CompileError` naming the line.
    """
    for node in graph.nodes:
        if node.target in _BY_STRIDES:
            source = value_of(node.args[0])
            filled = source.untyped_storage().nbytes() == source.numel() * source.element_size()
            if not (source.is_contiguous() and filled):
                raise CompileError(
                    f"{source_line(node)} reads a tensor by as_strided that is itself a view or "
                    "not contiguous: make it contiguous (.contiguous().clone()) first, or use "
                    "slices and permute."
                )


def index_instead_of_strides(graph: fx.Graph) -> None:
    """Replace strides by indices, in place; `graph` writes no tensor in place."""
    for node in list(graph.nodes):
        if node.target is aten.as_strided.default or node.target is aten.as_strided_scatter.default:
            node.replace_all_uses_with(_by_index(graph, node))
            graph.erase_node(node)


def _by_index(graph: fx.Graph, node: fx.Node) -> fx.Node:
    arguments = arguments_by_name(node)
    memory = arguments.get("input", arguments.get("self"))
    assert isinstance(memory, fx.Node)
    like = value_of(memory)
    offset = arguments.get("storage_offset")
    with graph.inserting_before(node):

        def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            return insert_call(graph, node, target, args, kwargs)

        places = call(aten.full.default, [1], offset or 0, dtype=torch.int64, device=like.device)
        for size, stride in zip(arguments["size"], arguments["stride"], strict=True):
            along = call(aten.arange.default, size, dtype=torch.int64, device=like.device)
            places = call(aten.unsqueeze.default, places, -1)
            places = call(aten.add.Tensor, places, call(aten.mul.Tensor, along, stride))
        chosen = call(aten.reshape.default, places, [-1])
        flat = call(aten.reshape.default, memory, [-1])
        if node.target is aten.as_strided.default:
            read = call(aten.index_select.default, flat, 0, chosen)
            return call(aten.reshape.default, read, list(arguments["size"]))
        values = call(aten.reshape.default, arguments["src"], [-1])
        written = call(aten.scatter.src, flat, 0, chosen, values)
        return call(aten.reshape.default, written, list(like.shape))
