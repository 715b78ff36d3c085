"""Executables of stages whose weight products run on the simulated mesh.

A product is found in the stage's graph: a product of matrices one of which is a weight, or a view
of one; or one that sums over tokens and has the shape of a weight, which is its gradient. All other
operators compute as on the CPU.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from penstock.compiler import Head, operator_costs
from penstock.engine.simulated_products import ProductSimulator, SimulatedHead
from penstock.engine.stage_graphs import HEAD, operator_name, source_of, weights_and_tangents
from penstock.engine.wafer_heads import heads_of
from penstock.engine.wafer_plan import WaferPlan
from penstock.operator_cost import OperatorCost
from penstock.program import Kind, Program
from penstock.wafer.closed_form import stage_cycles

EXECUTABLES = ("forward", "infer", "backward", "recompute", "turn")
_TRANSPOSED = ("onednn_linear", "token_linear")  # take their right factor transposed
# The places of the factors.
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), **dict.fromkeys(_TRANSPOSED, (0, 1))}
_BIAS = {"addmm": 0, **dict.fromkeys(_TRANSPOSED, 2)}
_SPARSE = ("sparse_linear", "sparse_weight_gradient")


@dataclass(frozen=True)
class _Product:
    """What a node computes with weights.

    Attributes:
        is_gradient: the product belongs to the backward sweep.
        of_weight: it is the gradient of a weight.
        is_turned: its left factor is the transposed input, not the transposed gradient.
    """

    is_gradient: bool
    of_weight: bool = False
    is_turned: bool = False


def simulated_program(program: Program, plan: WaferPlan, simulator: ProductSimulator) -> Program:
    """Return a program whose executables run the products of weights on a mesh."""
    kinds: dict[str, Kind] = {}
    for stage in program.stages:
        kind = stage.kind
        if kind.digest not in kinds:
            tokens = plan.kinds[kind.digest].tokens
            made: dict[str, Any] = {
                name: _Executable(kind.graphs[name], _found(kind, name, tokens), simulator)
                for name in EXECUTABLES
            }
            kinds[kind.digest] = replace(kind, **made)
    stages = tuple(replace(stage, kind=kinds[stage.kind.digest]) for stage in program.stages)
    return replace(program, stages=stages)


def cycles_beside_products(kind: Kind, executable: str, plan: WaferPlan) -> float:
    """Return the cycles of what is not simulated of one micro-batch of a stage, in closed form."""
    place = plan.kinds[kind.digest]
    found = stage_cycles(
        _costs_beside(kind, executable, place.tokens),
        place.tokens,
        place.layout,
        plan.options.core,
        head_size=place.head_size,
        heads=heads_of(kind, executable, {}),
    )
    total = 0.0
    for operator in found.operators:
        is_head = operator.cost.work == "head"  # its products are simulated, the softmax is not
        total += operator.cost.calls * operator.parts[-1].total if is_head else operator.cycles
    return total


def _costs_beside(kind: Kind, executable: str, tokens: int) -> tuple[OperatorCost, ...]:
    graph, found = kind.graphs[executable], _found(kind, executable, tokens)
    heads = tuple(cost for cost in kind.costs[executable] if cost.work == "head")
    return (*operator_costs(graph, without=found), *heads)


class _Executable(fx.Interpreter):
    """Runs a graph, and its products of weights on the mesh."""

    def __init__(
        self, graph: fx.Graph, products: Mapping[fx.Node, _Product], simulator: ProductSimulator
    ) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self.extra_traceback = False
        self._products, self._simulator = products, simulator

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        product = self._products.get(n)
        if product is None:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        name = operator_name(n)
        if name.startswith(HEAD):
            return self._head(name, args, kwargs, n)
        self._simulator.is_gradient = product.is_gradient
        if name in _SPARSE:
            return super().run_node(n)
        left, right = (args[place] for place in _PRODUCTS[name])
        right = right.t() if name in _TRANSPOSED else right
        if product.of_weight:
            if product.is_turned:
                return self._simulator.weight_gradient(right, left.t()).t().contiguous()
            return self._simulator.weight_gradient(left.t(), right)
        found = self._simulator.product(left, right)
        bias = None if name == "mm" else args[_BIAS[name]]
        return found if bias is None else found + bias

    def _head(self, name: str, args: Any, kwargs: Any, node: fx.Node) -> Any:
        """Run a fused head; one with a sparse weight calls that weight's own products."""
        self._simulator.is_gradient = None
        if not isinstance(node.target, torch._ops.OpOverload):
            return super().run_node(node)
        has_scale = name.endswith(("_backward", "_turn"))
        scale, rest = (args[0], args[1:]) if has_scale else (None, args)
        hidden, weight, bias, labels, ignored = rest[:5]
        head = Head(hidden, SimulatedHead(weight, self._simulator), bias, labels, ignored)
        if name.endswith("_predictions"):
            return head.loss_sum_and_predictions()
        if scale is None:
            return head.loss_sum()
        found = head.loss_sum_and_gradients(scale, rest[5])
        return found[1:] if name.endswith("_backward") else found


def _found(kind: Kind, executable: str, tokens: int) -> dict[fx.Node, _Product]:
    """Return the products of weights in a graph."""
    graph = kind.graphs[executable]
    weights, tangents = weights_and_tangents(kind, executable)
    shapes = {tuple(spec.shape) for spec in kind.weights if len(spec.shape) == 2}
    later = _depending(graph, tangents)
    found = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name = operator_name(node)
        if name in _SPARSE or name.startswith(HEAD):
            found[node] = _Product(node in later)
        elif name in _PRODUCTS and _is_float(node):
            product = _product(node, name, weights, later, shapes, tokens)
            if product is not None:
                found[node] = product
    return found


def _product(
    node: fx.Node,
    name: str,
    weights: Collection[fx.Node],
    later: Collection[fx.Node],
    shapes: Collection[tuple[int, ...]],
    tokens: int,
) -> _Product | None:
    left, right = (node.args[place] for place in _PRODUCTS[name])
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    if source_of(right) in weights:
        return _Product(left in later)
    inner, shape = left.meta["val"].shape[1], tuple(node.meta["val"].shape)
    is_gradient = shape in shapes or shape[::-1] in shapes
    if inner != tokens or not is_gradient or not {left, right} & set(later):
        return None
    return _Product(True, of_weight=True, is_turned=left not in later)


def _depending(graph: fx.Graph, sources: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes that are computed from some of the given ones, and these."""
    found = set(sources)
    for node in graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _is_float(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.dim() == 2
