"""Gradients that the user's code defines: `torch.autograd.Function` in a captured graph.

During capture, the forward of such a function is traced like any other code, directly followed by
its backward. Two operators mark the related nodes in the graph:

- `penstock::output_gradient` stands for the gradient of one output; the backward begins there;
- `penstock::custom_gradient` returns the outputs. For autograd it connects the outputs with the
  inputs, and takes the inputs' gradients from the traced backward.

Both are ordinary operators without side effects, so every rewrite of the graph is also valid within
the backward. `fold_custom_gradients` then moves each backward into the one node that returns the
outputs, a `CustomGradient`. When the joint graph of a stage is traced, autograd runs through that
node and through the backward in it; the executables of an engine contain neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from penstock.compiler.digests import digest_of, lines_of
from penstock.compiler.nodes import erase_unused, source_line
from penstock.compiler.retarget_devices import move
from penstock.errors import CompileError


@torch.library.custom_op("penstock::output_gradient", mutates_args=())
def output_gradient(output: Tensor, call: int) -> Tensor:
    """Stand for the gradient of `output`; `call` numbers the calls of custom functions."""
    return torch.zeros_like(output, memory_format=torch.contiguous_format)


@torch.library.custom_op("penstock::custom_gradient", mutates_args=())
def custom_gradient(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    output_gradients: Sequence[Tensor],
    call: int,
) -> list[Tensor]:
    """Return `outputs`; `gradients` are those of `inputs`, computed from `output_gradients`."""
    return [output.clone() for output in outputs]


@output_gradient.register_fake
def _(output: Tensor, call: int) -> Tensor:
    return torch.empty_like(output, memory_format=torch.contiguous_format)


@custom_gradient.register_fake
def _(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    output_gradients: Sequence[Tensor],
    call: int,
) -> list[Tensor]:
    return [torch.empty_like(output) for output in outputs]


def _never(ctx: Any, *gradients: Tensor) -> Any:
    raise AssertionError("a custom gradient is folded before autograd runs")


# Outputs of the captured call require a gradient, as the outputs of the user's function do.
custom_gradient.register_autograd(_never)

aten = torch.ops.aten
_ops = torch.ops.penstock
WITHIN_FUNCTION = "within_custom_function"  # in the meta of nodes that a function's code creates


class CustomGradient:
    """The target of a node that returns a function's outputs and knows the function's backward.

    The node's arguments are the differentiable inputs, the outputs, and the values that the
    backward reads. `backward` takes these values and the outputs' gradients, and returns the
    inputs' gradients, or None.
    """

    __module__ = __name__
    __name__ = "custom_gradient"

    def __init__(self, backward: fx.Graph) -> None:
        self.backward = backward
        self._run = fx.Interpreter(nn.Module(), graph=backward).run
        self._digest = digest_of(lines_of(backward))

    def __repr__(self) -> str:
        return f"{self.__name__} {self._digest}"

    def __call__(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], saved: Sequence[Tensor]
    ) -> Any:
        return _Connected.apply(self._run, len(inputs), tuple(saved), *inputs, *outputs)

    def moved(self, device: str) -> CustomGradient:
        """Return the same for an engine's device."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.backward, {}))
        for node in graph.nodes:
            move(node, device)
        return CustomGradient(graph)


class _Connected(torch.autograd.Function):
    """Returns its last arguments unchanged; gradients go to its first arguments."""

    @staticmethod
    def forward(ctx: Any, run: Any, count: int, saved: Sequence[Tensor], *tensors: Tensor) -> Any:
        ctx.run, ctx.saved, ctx.outputs = run, saved, len(tensors) - count
        return tensors[count:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Dense, as in the traced backward: a sum passes on a gradient that is one expanded number.
        found = ctx.run(*ctx.saved, *(gradient.contiguous() for gradient in gradients))
        return (None, None, None, *found, *[None] * ctx.outputs)


def fold_custom_gradients(graph: fx.Graph) -> None:
    """Move every traced backward of `graph` into the node that returns the outputs, in place.

    **Raises:** `CompileError` for a backward whose values are used outside it, or that draws random
    numbers.
    """
    _detach_what_leaves(graph)
    for node in list(graph.nodes):
        if node.target is _ops.custom_gradient.default:
            _fold(node)
    erase_unused(graph)
    for node in graph.nodes:
        if node.target is _ops.output_gradient.default:
            raise CompileError(
                f"{source_line(node)}: the backward of a torch.autograd.Function keeps a gradient "
                "for other code, which would never receive a value: return the gradient instead."
            )


def _detach_what_leaves(graph: fx.Graph) -> None:
    """Detach values of a function's code that other code reads: PyTorch runs that code without
    gradients.

    Such values are few: outputs leave through `custom_gradient`, or are detached already.
    """
    for node in list(graph.nodes):
        if WITHIN_FUNCTION not in node.meta or not isinstance(node.meta.get("val"), Tensor):
            continue
        outside = [
            user
            for user in node.users
            if WITHIN_FUNCTION not in user.meta
            and user.target not in (_ops.custom_gradient.default, aten.detach.default)
        ]
        if outside:
            with graph.inserting_after(node):
                detached = graph.call_function(aten.detach.default, (node,))
            detached.meta = dict(node.meta)
            for user in outside:
                user.replace_input_with(node, detached)


def _fold(call: fx.Node) -> None:
    inputs, outputs, gradients, marks, _ = cast(
        tuple[list[fx.Node], list[fx.Node], list[fx.Node | None], list[fx.Node], int], call.args
    )
    given = list(map(_mark, marks))
    region = _between(given, gradients)
    for node in region:
        if node.target is _ops.dropout.default:
            raise CompileError(
                f"{source_line(node)} draws random numbers in the backward of a "
                "torch.autograd.Function, which a replayed step could not repeat: draw them in its "
                "forward with torch.nn.functional.dropout, and save them."
            )
    inside = {*given, *region}
    read = [source for node in region for source in node.all_input_nodes]
    read += [node for node in gradients if node is not None]
    saved = list(dict.fromkeys(node for node in read if node not in inside))
    backward = fx.Graph()
    made = {node: backward.placeholder(f"saved_{n}") for n, node in enumerate(saved)}
    made |= {node: backward.placeholder(f"gradient_{n}") for n, node in enumerate(given)}
    for node in region:
        made[node] = backward.node_copy(node, lambda n: made[n])
    backward.output(tuple(None if node is None else made[node] for node in gradients))
    call.target = CustomGradient(backward)
    call.args = (inputs, outputs, saved)


def _mark(node: fx.Node) -> fx.Node:
    """Return the output gradient that a node represents, detached if it left a region."""
    while node.target is not _ops.output_gradient.default:
        (node,) = node.all_input_nodes
    return node


def _between(given: Sequence[fx.Node], gradients: Sequence[fx.Node | None]) -> list[fx.Node]:
    """Return, in order, the nodes between the outputs' gradients and the inputs' gradients."""
    wanted: set[fx.Node] = set()
    stack = [node for node in gradients if node is not None]
    while stack:
        node = stack.pop()
        if node not in wanted:
            wanted.add(node)
            stack.extend(node.all_input_nodes)
    bound = {*given}
    region = []
    for node in sorted(wanted):
        if node not in bound and any(source in bound for source in node.all_input_nodes):
            bound.add(node)
            region.append(node)
    return region
