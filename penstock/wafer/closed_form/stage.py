"""Cycles of a stage of a program, from the costs of its operators that the compiler counts.

The costs of a product hold its operations, its bytes and the number of its calls, not its shape.
With the tokens of the stage, the shape follows: a product of T tokens with a weight [M, K] has
2 T K M operations and reads and writes T (K + M) + K M elements, and M more with a bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from penstock.errors import BudgetError, ConfigError
from penstock.operator_cost import OperatorCost
from penstock.wafer.closed_form.cycles import ProductCycles
from penstock.wafer.closed_form.layout import ActivationLayout, candidate_layouts
from penstock.wafer.closed_form.layout_choice import LayoutChoice
from penstock.wafer.closed_form.operators import (
    ACTIVATION_OPERATIONS,
    SOFTMAX_OPERATIONS,
    attention,
    lookup,
    memory_pass,
    norm,
    token_sum,
)
from penstock.wafer.closed_form.sparse_products import (
    HIDDEN,
    StreamedProduct,
    StreamingOptions,
    data_gradient,
    forward,
    step_cycles,
    weight_gradient,
)
from penstock.wafer.closed_form.sram import check_fits, sram_use
from penstock.wafer.parameters import CoreParameters, Mesh

_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
_TARGET_BYTES = 8
_FORWARD = ("forward", "infer")


@dataclass(frozen=True)
class OperatorCycles:
    """The cycles of one call of an operator.

    Attributes:
        parts: its operations, one after the other.
    """

    cost: OperatorCost
    parts: tuple[ProductCycles, ...]

    @property
    def cycles(self) -> float:
        """Of all calls."""
        return self.cost.calls * sum(part.total for part in self.parts)

    @property
    def binding(self) -> str:
        """The term that takes longest in the slowest part."""
        return max(self.parts, key=lambda part: part.total).largest_part


@dataclass(frozen=True)
class StageCycles:
    """The cycles of a stage's operators, one after the other."""

    operators: tuple[OperatorCycles, ...]

    @property
    def cycles(self) -> float:
        """Of the stage."""
        return sum(operator.cycles for operator in self.operators)

    @property
    def by_work(self) -> dict[str, float]:
        """Cycles by kind of work, the most first."""
        found: dict[str, float] = {}
        for operator in self.operators:
            found[operator.cost.work] = found.get(operator.cost.work, 0.0) + operator.cycles
        return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class WeightShape:
    """Features of a product's weight.

    Attributes:
        has_bias: whether the costs include a bias, which only a forward product has.
        is_exact: whether the counts of the compiler fit a product of such a shape.
    """

    outputs: int
    inputs: int
    has_bias: bool = False
    is_exact: bool = True


def stage_cycles(
    costs: Iterable[OperatorCost],
    tokens: int,
    layout: ActivationLayout,
    core: CoreParameters,
    options: StreamingOptions = HIDDEN,
    *,
    executable: str = "forward",
    head_size: int = 64,
) -> StageCycles:
    """Return the cycles of the operators of a stage.

    Args:
        costs: of one executable, `Kind.costs[executable]`.
        tokens: of the micro-batch for which the costs were counted.
        executable: its name. In `backward` a product over features is a data gradient; in
            `recompute` and `turn` it is one if it has no bias.
        head_size: features of an attention head, which the costs do not hold.

    Raises:
        ConfigError: no token.
    """
    if tokens < 1:
        raise ConfigError(f"tokens: expected a number from 1 up, got {tokens}")
    place = _Place(tokens, layout, core, options, executable, head_size)
    return StageCycles(tuple(OperatorCycles(cost, place.parts(cost)) for cost in costs))


def choose_stage_layout(
    costs: Mapping[str, Iterable[OperatorCost]],
    tokens: int,
    mesh: Mesh,
    core: CoreParameters,
    options: StreamingOptions = HIDDEN,
    *,
    head_size: int = 64,
) -> LayoutChoice:
    """Return the layout in which a stage takes the fewest cycles; of equal ones, the plainest.

    Args:
        costs: by executable, such as those of `forward` and `backward`.

    Raises:
        BudgetError: in no layout do all products fit the cores' memory.
    """
    given = {name: tuple(parts) for name, parts in costs.items()}
    products = [
        _streamed(weight_shape(cost, tokens), tokens, _ELEMENT_BYTES.get(cost.dtype, 4))
        for parts in given.values()
        for cost in parts
        if cost.work in ("product", "sparse product")
    ]
    found = []
    for layout in candidate_layouts(mesh):
        if all(sram_use(product, layout, core, options).fits for product in products):
            cycles = sum(
                stage_cycles(
                    parts, tokens, layout, core, options, executable=name, head_size=head_size
                ).cycles
                for name, parts in given.items()
            )
            found.append((cycles, layout))
    if not found:
        worst = max(products, key=lambda product: product.outputs + product.inputs)
        check_fits(worst, ActivationLayout(mesh), core, options, name="stage")
        raise BudgetError(
            f"stage: no layout of activations on {mesh} cores holds all of its products with "
            f"{tokens} tokens; lower batch.micro or take a larger mesh"
        )
    cycles, layout = min(found, key=lambda pair: pair[0])
    return LayoutChoice(layout, cycles, len(found))


def weight_shape(cost: OperatorCost, tokens: int) -> WeightShape:
    """Return the shape of the weight of a product, from its operations and bytes.

    Without a bias the costs are the same with both sides exchanged; the larger side is taken for
    the outputs, which has more partial sums.
    """
    kept = cost.flops / (2 * tokens)
    density = cost.size if cost.work == "sparse product" else 1.0
    weights = round(kept / density)
    moved = cost.bytes
    if cost.name == "sparse_weight_gradient":
        moved -= 4 * round(kept)  # the gradients of kept entries are float32
    elements = moved / _ELEMENT_BYTES.get(cost.dtype, 4) - weights
    # T (K + M) + M, with K M known, is a quadratic equation for M.
    for bias in (0, 1):
        found = _roots(tokens + bias, -elements, tokens * weights)
        for outputs in found:
            inputs, rest = divmod(weights, outputs)
            exact = not rest and tokens * (inputs + outputs) + bias * outputs == elements
            if exact:
                return WeightShape(outputs, inputs, bool(bias))
    side = max(1, math.isqrt(max(weights, 1)))
    return WeightShape(side, max(1, round(weights / side)), is_exact=False)


def _streamed(shape: WeightShape, tokens: int, width: int) -> StreamedProduct:
    return StreamedProduct(
        shape.outputs, shape.inputs, tokens, is_indexed=False, element_bytes=width
    )


def _roots(a: int, b: float, c: float) -> list[int]:
    """Return the whole positive numbers next to the roots of a x^2 + b x + c, the largest first."""
    inner = b * b - 4 * a * c
    if inner < 0:
        return []
    root = math.sqrt(inner)
    near = {round((-b + sign * root) / (2 * a)) for sign in (1, -1)}
    return sorted((value for value in near if value > 0), reverse=True)


@dataclass(frozen=True)
class _Place:
    """Where and how the operators of a stage are computed."""

    tokens: int
    layout: ActivationLayout
    core: CoreParameters
    options: StreamingOptions
    executable: str
    head_size: int

    def parts(self, cost: OperatorCost) -> tuple[ProductCycles, ...]:
        width = _ELEMENT_BYTES.get(cost.dtype, 4)
        layout, core = self.layout, self.core
        if cost.work in ("product", "sparse product"):
            return (self._product(cost, width),)
        if cost.work == "head":
            return self._head(cost, width)
        if cost.work == "attention":
            return (self._attention(cost, width),)
        if cost.work == "norm":
            return (norm(cost.bytes, self.tokens, layout, core, width),)
        if cost.work == "reduction":
            return (token_sum(cost.bytes, layout, core, width),)
        if cost.work == "lookup":
            return (lookup(cost.bytes, layout, core),)
        operations = ACTIVATION_OPERATIONS if cost.work == "activation" else 1
        return (
            memory_pass(cost.bytes, layout, core, width, operations=operations, name=cost.work),
        )

    def _product(self, cost: OperatorCost, width: int) -> ProductCycles:
        shape = weight_shape(cost, self.tokens)
        product = _streamed(shape, self.tokens, width)
        if cost.work == "sparse product":
            product = replace(product, density=min(1.0, cost.size), is_indexed=True)
        elif not shape.is_exact:
            return self._batched(cost, width)
        form = forward
        if cost.layout == "tokens" or cost.name == "sparse_weight_gradient":
            form = weight_gradient
        elif not shape.has_bias and self.executable not in _FORWARD:
            form = data_gradient
        return form(product, self.layout, self.core, self.options)

    def _batched(self, cost: OperatorCost, width: int) -> ProductCycles:
        """Products of activations with activations, one per sequence and head. Assumed: divided
        evenly, with vector operations of as many elements as a core has tokens."""
        core, here = self.core, self.layout.tokens(self.tokens)
        lanes = core.simd_half if width == 2 else core.simd_float
        operations = cost.flops / 2 / self.layout.mesh.cores / here
        return ProductCycles(
            "product",
            arithmetic=operations * core.elements_cycles(here, width),
            set_up=operations * core.trigger_cycles,
            fill=2 * core.hop_cycles * self.layout.mesh.diameter,
            useful=operations * here / lanes,
        )

    def _head(self, cost: OperatorCost, width: int) -> tuple[ProductCycles, ...]:
        is_backward = "backward" in cost.name or "turn" in cost.name
        times = 3 if is_backward else 1
        tokens = round(cost.size)
        weights = cost.flops / times / (2 * tokens)
        moved = (cost.bytes - _TARGET_BYTES * tokens) / width / (2 if is_backward else 1)
        inputs = max(1, round((moved - weights) / tokens))
        product = StreamedProduct(
            max(1, round(weights / inputs)), inputs, tokens, is_indexed=False, element_bytes=width
        )
        logits = 2 * width * product.outputs * tokens
        soft = memory_pass(
            logits,
            self.layout,
            self.core,
            width,
            operations=SOFTMAX_OPERATIONS,
            name="softmax",
        )
        step = step_cycles(product, self.layout, self.core, self.options)
        return (*step[: 3 if is_backward else 1], soft)

    def _attention(self, cost: OperatorCost, width: int) -> ProductCycles:
        is_backward = "backward" in cost.name
        sequence = round(cost.size)
        flops = cost.flops / (2.5 if is_backward else 1.0)
        hidden = max(1, round(flops / (4 * sequence * self.tokens)))
        return attention(
            sequence,
            hidden,
            self.tokens,
            self.layout,
            self.core,
            head_size=min(self.head_size, hidden),
            element_bytes=width,
            is_backward=is_backward,
        )
