"""Cycles of a stage of a program, from the costs of its operators that the compiler counts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    streams_of,
    token_sum,
)
from penstock.wafer.closed_form.sparse_products import data_gradient, forward, weight_gradient
from penstock.wafer.closed_form.sram import check_fits, sram_use
from penstock.wafer.closed_form.streamed_product import HIDDEN, StreamedProduct, StreamingOptions
from penstock.wafer.closed_form.weight_shapes import (
    ELEMENT_BYTES,
    HeadShape,
    head_shape,
    is_backward_head,
    streams_weight,
)
from penstock.wafer.parameters import CoreParameters, Mesh

_FORMS = {"forward": forward, "data gradient": data_gradient, "weight gradient": weight_gradient}


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


def stage_cycles(
    costs: Iterable[OperatorCost],
    tokens: int,
    layout: ActivationLayout,
    core: CoreParameters,
    options: StreamingOptions = HIDDEN,
    *,
    head_size: int = 64,
    heads: Sequence[HeadShape] = (),
) -> StageCycles:
    """Return the cycles of the operators of a stage.

    Args:
        costs: of one executable, `Kind.costs[executable]`.
        tokens: of the micro-batch for which the costs were counted.
        head_size: features of an attention head, which the costs do not hold.
        heads: the weights of language-model heads; one that is missing is taken as dense.

    Raises:
        ConfigError: no token.
    """
    if tokens < 1:
        raise ConfigError(f"tokens: expected a number from 1 up, got {tokens}")
    place = _Place(tokens, layout, core, options, head_size, heads)
    return StageCycles(tuple(OperatorCycles(cost, place.parts(cost)) for cost in costs))


def choose_stage_layout(
    costs: Mapping[str, Iterable[OperatorCost]],
    tokens: int,
    mesh: Mesh,
    core: CoreParameters,
    options: StreamingOptions = HIDDEN,
    *,
    head_size: int = 64,
    heads: Sequence[HeadShape] = (),
) -> LayoutChoice:
    """Return the layout in which a stage takes the fewest cycles; of equal ones, the plainest.

    Args:
        costs: by executable, such as those of `forward` and `backward`.
        head_size, heads: as for `stage_cycles`.

    Raises:
        BudgetError: in no layout do all products fit the cores' memory.
    """
    given = {name: tuple(parts) for name, parts in costs.items()}
    every = (cost for parts in given.values() for cost in parts)
    products = tuple(stage_products(every, tokens, heads))
    found = []
    for layout in candidate_layouts(mesh):
        if all(
            sram_use(product, layout, core, options, in_place=is_head).fits
            for product, is_head in products
        ):
            cycles = sum(
                stage_cycles(
                    parts, tokens, layout, core, options, head_size=head_size, heads=heads
                ).cycles
                for parts in given.values()
            )
            found.append((cycles, layout))
    if not found:
        plain = ActivationLayout(mesh)
        worst, is_head = max(
            products,
            key=lambda pair: sram_use(pair[0], plain, core, options, in_place=pair[1]).total,
        )
        check_fits(worst, plain, core, options, name="stage", in_place=is_head)
        raise BudgetError(
            f"stage: no layout of activations on {mesh} cores holds all of its products with "
            f"{tokens} tokens; give fewer tokens (a smaller batch.micro) or take a larger mesh"
        )
    cycles, layout = min(found, key=lambda pair: pair[0])
    return LayoutChoice(layout, cycles, len(found))


def stage_products(
    costs: Iterable[OperatorCost], tokens: int, heads: Sequence[HeadShape] = ()
) -> Iterator[tuple[StreamedProduct, bool]]:
    """Yield the products with a weight that some costs contain, and whether each is one of a
    language-model head, whose logits are replaced by their gradients."""
    for cost in costs:
        width = ELEMENT_BYTES.get(cost.dtype, 4)
        if cost.work in ("product", "sparse product"):
            if streams_weight(cost, tokens):
                yield _streamed(cost, tokens, width), False
        elif cost.work == "head":
            yield _head_product(head_shape(cost, heads, width), round(cost.size), width), True


def _streamed(cost: OperatorCost, tokens: int, width: int) -> StreamedProduct:
    return StreamedProduct(cost.outputs, cost.inputs, tokens, is_indexed=False, element_bytes=width)


def _head_product(head: HeadShape, tokens: int, width: int) -> StreamedProduct:
    return StreamedProduct(
        head.outputs,
        head.inputs,
        tokens,
        density=max(1, head.kept) / (head.outputs * head.inputs),
        is_indexed=head.is_sparse,
        element_bytes=width,
    )


@dataclass(frozen=True)
class _Place:
    """Where and how the operators of a stage are computed."""

    tokens: int
    layout: ActivationLayout
    core: CoreParameters
    options: StreamingOptions
    head_size: int
    heads: Sequence[HeadShape]

    def parts(self, cost: OperatorCost) -> tuple[ProductCycles, ...]:
        width = ELEMENT_BYTES.get(cost.dtype, 4)
        layout, core = self.layout, self.core
        if cost.work in ("product", "sparse product"):
            return (self._product(cost, width),)
        if cost.work == "head":
            return self._head(cost, width)
        if cost.work == "attention":
            return (self._attention(cost, width),)
        if cost.work == "norm":
            streams = streams_of(cost.work, cost.name)
            return (norm(cost.bytes, self.tokens, layout, core, width, streams=streams),)
        if cost.work == "reduction":
            return (token_sum(cost.bytes, self.tokens, layout, core, width),)
        if cost.work == "lookup":
            return (lookup(cost.bytes, layout, core),)
        operations = ACTIVATION_OPERATIONS if cost.work == "activation" else 1
        passes = memory_pass(
            cost.bytes,
            layout,
            core,
            width,
            streams=streams_of(cost.work, cost.name),
            operations=operations,
            name=cost.work,
        )
        return (passes,)

    def _product(self, cost: OperatorCost, width: int) -> ProductCycles:
        if not streams_weight(cost, self.tokens):
            return self._batched(cost, width)
        product = _streamed(cost, self.tokens, width)
        if cost.work == "sparse product":
            product = replace(product, density=min(1.0, cost.size), is_indexed=True)
        return _FORMS[cost.form](product, self.layout, self.core, self.options)

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
        head = head_shape(cost, self.heads, width)
        product = _head_product(head, round(cost.size), width)
        place = (self.layout, self.core, self.options)
        parts = [forward(product, *place)]
        if is_backward_head(cost):
            parts.append(data_gradient(product, *place))
            if head.gradient == "all":
                whole = replace(product, density=1.0, is_indexed=False)
                parts.append(weight_gradient(whole, *place))
            elif head.gradient == "kept":
                parts.append(weight_gradient(product, *place))
        logits = 2 * width * product.outputs * product.tokens
        softmax = memory_pass(
            logits,
            self.layout,
            self.core,
            width,
            operations=SOFTMAX_OPERATIONS,
            name="softmax",
        )
        return (*parts, softmax)

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
