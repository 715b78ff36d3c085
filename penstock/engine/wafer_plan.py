"""How the stages of a program lie on a mesh of cores, decided before the first step.

A stage is divided by the number of tokens of a micro-batch, which a program does not name: it is
the number of rows of the stage's own activations for which the compiler's costs are those of
products with whole weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from penstock.compiler import operator_of
from penstock.engine.wafer_heads import heads_of
from penstock.errors import BudgetError
from penstock.program import Kind, Program, TensorSpec
from penstock.wafer import WaferOptions
from penstock.wafer.closed_form import (
    ActivationLayout,
    HeadShape,
    check_fits,
    choose_stage_layout,
    stage_products,
    streams_weight,
)

_USUAL_HEAD_SIZE = 64
_PRODUCTS = ("product", "sparse product")
_ATTENTION = "_scaled_dot_product"


@dataclass(frozen=True)
class KindPlan:
    """The place of a kind's stages on the mesh.

    Attributes:
        tokens: rows of a micro-batch's activations.
        layout: of the activations.
        head_size: features of an attention head.
    """

    tokens: int
    layout: ActivationLayout
    head_size: int


@dataclass(frozen=True)
class WaferPlan:
    """The mesh of an engine, and the place of each kind of stage, by the kind's digest."""

    options: WaferOptions
    kinds: Mapping[str, KindPlan]


def plan_wafer(program: Program, options: WaferOptions) -> WaferPlan:
    """Choose the layout of activations for each kind of stage.

    Sparse weights count with the most entries that they may have. Simulated products have the plain
    layout, tokens over columns of cores and features over rows, and all operators of a run with
    such products have it too.

    Raises:
        BudgetError: a stage does not fit the cores' memory; the text names the stage.
    """
    found: dict[str, KindPlan] = {}
    last = program.stages[-1].kind.digest
    for stage in program.stages:
        kind = stage.kind
        if kind.digest not in found:
            try:
                found[kind.digest] = _place(kind, options, is_last=kind.digest == last)
            except BudgetError as error:
                text = str(error).removeprefix("stage: ")
                raise BudgetError(f"engine.mesh: stage {stage.name}: {text}") from None
    return WaferPlan(options, found)


def _place(kind: Kind, options: WaferOptions, *, is_last: bool) -> KindPlan:
    tokens, head_size = tokens_of(kind), head_size_of(kind)
    if is_last:
        names: tuple[str, ...] = ("turn",)
    elif any(kind.outputs_grad):
        names = ("forward", "backward")
    else:  # frozen, before all trained weights: it has no backward
        names = ("forward",)
    heads = heads_of(kind, names[0], {})
    if options.cycles == "simulated":
        layout = _plain_layout(kind, names[0], tokens, heads, options)
        return KindPlan(tokens, layout, head_size)
    choice = choose_stage_layout(
        {name: kind.costs[name] for name in names},
        tokens,
        options.mesh,
        options.core,
        head_size=head_size,
        heads=heads,
    )
    return KindPlan(tokens, choice.layout, head_size)


def _plain_layout(
    kind: Kind, executable: str, tokens: int, heads: Sequence[HeadShape], options: WaferOptions
) -> ActivationLayout:
    """Return the layout of the simulated programs, in which all products of a kind must fit."""
    layout = ActivationLayout(options.mesh)
    for product, is_head in stage_products(kind.costs[executable], tokens, heads):
        check_fits(product, layout, options.core, name="stage", in_place=is_head)
    return layout


def tokens_of(kind: Kind) -> int:
    """Return the rows of a kind's activations: those with which most of its products have a whole
    weight; of equal numbers, the largest."""
    floating = [
        spec
        for spec in (*kind.inputs, *kind.outputs)
        if spec.dtype.is_floating_point and len(spec.shape) > 1
    ]
    candidates = {_rows(spec) for spec in floating} or {max(map(_rows, kind.inputs), default=1)}
    products = [cost for cost in kind.costs["forward"] if cost.work in _PRODUCTS]

    def exact(tokens: int) -> int:
        return sum(cost.calls for cost in products if streams_weight(cost, tokens))

    return max(candidates, key=lambda tokens: (exact(tokens), tokens))


def head_size_of(kind: Kind) -> int:
    """Return the features of an attention head in a kind; 64 if it has no attention."""
    graph = kind.graphs.get("forward")
    for node in () if graph is None else graph.nodes:
        if node.op == "call_function" and _ATTENTION in str(operator_of(node)):
            query = node.args[0]
            value = query.meta.get("val") if isinstance(query, fx.Node) else None
            if isinstance(value, torch.Tensor):
                return int(value.shape[-1])
    return _USUAL_HEAD_SIZE


def _rows(spec: TensorSpec) -> int:
    return math.prod(spec.shape[:-1]) if len(spec.shape) > 1 else math.prod(spec.shape)
