"""The operators of a step as cases: each is a small graph, traced and counted as a stage's is.

The compiler chooses the library of its products, and its cost model counts the work. So a rate is
measured in the units in which a prediction divides by it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.calibration.repetitions import Case, Prepared, Quantity
from penstock.compiler import (
    Products,
    choose_products,
    lower_activations,
    lower_attention,
    operator_costs,
    widens,
)
from penstock.constants import IGNORED_LABEL
from penstock.errors import ProgramError
from penstock.machines import IN_FLOPS

aten = torch.ops.aten
penstock = torch.ops.penstock

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALLEST_DIMENSIONS = (16, 64, 256, 1024, 2048)
_TOKENS, _FEATURES = 2048, 1024  # the large dimensions of a product
_SEQUENCE_LENGTHS, _HEAD_SIZE, _ATTENTION_TOKENS = (128, 512, 2048), 64, 8192
_LOSS_TOKENS, _HIDDEN, _VOCABULARY = (64, 256, 1024), 512, 8192
_MANY_BYTES = tuple(size << 10 for size in (64, 512, 4096, 16384, 65536))
_SOME_BYTES = tuple(size << 10 for size in (256, 4096, 32768))
_SCALE = 0.125  # of operands
_WIDTH = 512  # of the rows of a norm, a reduction and a table


@dataclass(frozen=True)
class Operand:
    """An input of a case; of integers, all numbers are below `below`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int = 0


class Operands:
    """Random tensors that all cases share.

    They are small, as weights are. The logits of a head are then of the order of 1; with large
    ones, most of its probabilities would be denormal numbers, which products of float32 multiply
    several times more slowly.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._values: dict[torch.dtype, torch.Tensor] = {}

    def take(self, operands: tuple[Operand, ...]) -> list[torch.Tensor]:
        """Return tensors for the operands of one case, which do not overlap."""
        used = dict.fromkeys(self._values, 0)
        taken = []
        for operand in operands:
            if operand.below:
                taken.append(self._integers(operand))
                continue
            begin = used.get(operand.dtype, 0)
            count = torch.Size(operand.shape).numel()
            used[operand.dtype] = begin + count
            values = self._at_least(operand.dtype, begin + count)
            taken.append(values[begin : begin + count].view(operand.shape))
        return taken

    def _integers(self, operand: Operand) -> torch.Tensor:
        return torch.randint(operand.below, operand.shape, generator=self._generator)

    def _at_least(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        have = self._values.get(dtype)
        if have is None or len(have) < count:
            have = (
                torch.randn(max(count, 1 << 20), generator=self._generator).mul_(_SCALE).to(dtype)
            )
            self._values[dtype] = have
        return have


def operator_cases(products: Products, threads: int) -> Iterator[Case]:
    """Yield the cases of all operators of an engine on the processor.

    Args:
        products: the library for large float32 products.
        threads: of the engine; attention gets at least one head for each.
    """
    make = _CaseMaker(products, Operands())
    for name, dtype in DTYPES.items():
        if dtype == torch.float32 or not widens(products):
            yield from _products(make, name, dtype)
        yield from _attention(make, name, dtype, threads)
        yield from _heads(make, name, dtype, products)
        yield from _elementwise(make, name, dtype)
        yield from _rows(make, name, dtype)


@dataclass(frozen=True)
class _CaseMaker:
    products: Products
    operands: Operands

    def __call__(
        self, work: str, dtype: str, function: Callable[..., Any], *operands: Operand, layout="any"
    ) -> Case:
        quantity = Quantity("engine", work, dtype, layout)
        return Case(quantity, lambda: self._prepared(quantity, function, operands))

    def _prepared(
        self, quantity: Quantity, function: Callable[..., Any], operands: tuple[Operand, ...]
    ) -> Prepared:
        graph = traced(function, operands, self.products)
        amount, size = amount_of(quantity, graph)
        lower_activations(graph)
        lower_attention(graph, self.products)
        executable = fx.GraphModule(torch.nn.Module(), graph)
        tensors = self.operands.take(operands)
        return Prepared(lambda: executable(*tensors), amount, size)


def traced(
    function: Callable[..., Any], operands: tuple[Operand, ...], products: Products
) -> fx.Graph:
    """Return a function's graph with the library of its products chosen."""
    with FakeTensorMode():
        fakes = [torch.empty(operand.shape, dtype=operand.dtype) for operand in operands]
        graph = make_fx(function)(*fakes).graph
    choose_products(graph, products)
    return graph


def amount_of(quantity: Quantity, graph: fx.Graph) -> tuple[float, float]:
    """Return the FLOPs or bytes of a graph as the cost model counts them, and the size of a call.

    Raises:
        ProgramError: the cost model takes an operator for other work.
    """
    costs = operator_costs(graph)
    for cost in costs:
        found = Quantity("engine", cost.work, cost.dtype, cost.layout)
        if found != quantity:
            raise ProgramError(
                f"calibration: expected {cost.name} to be counted as {quantity}, got {found}"
            )
    calls = sum(cost.calls for cost in costs)
    if quantity.work in IN_FLOPS:
        return sum(cost.flops * cost.calls for cost in costs), costs[0].size
    moved = sum(cost.bytes * cost.calls for cost in costs)
    return moved, moved / calls


def _products(make: _CaseMaker, name: str, dtype: torch.dtype) -> Iterator[Case]:
    """The three products of a linear layer, of which the inputs have the smallest dimension."""

    def over_features(x: Any, weight: Any, dy: Any) -> Any:
        return torch.mm(x, weight.t()), torch.mm(dy, weight)

    def over_tokens(x: Any, dy: Any) -> Any:
        return torch.mm(dy.t(), x)

    for smallest in SMALLEST_DIMENSIONS:
        outputs = max(_FEATURES, smallest)
        x, weight, dy = (
            Operand(shape, dtype)
            for shape in ((_TOKENS, smallest), (outputs, smallest), (_TOKENS, outputs))
        )
        yield make("product", name, over_features, x, weight, dy, layout="features")
        yield make("product", name, over_tokens, x, dy, layout="tokens")


def _attention(make: _CaseMaker, name: str, dtype: torch.dtype, threads: int) -> Iterator[Case]:
    """Causal attention, forward and backward, with heads that a model splits off its features."""

    def both(*given: Any) -> Any:
        query, key, value, gradient = (tensor.transpose(1, 2) for tensor in given)
        out, total = aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, 0.0, True
        )
        return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            gradient, query, key, value, out, total, 0.0, True
        )

    for length in _SEQUENCE_LENGTHS:
        rows = _ATTENTION_TOKENS // length
        heads = -(-threads // rows)
        operand = Operand((rows, length, heads, _HEAD_SIZE), dtype)
        yield make("attention", name, both, operand, operand, operand, operand)


def _heads(make: _CaseMaker, name: str, dtype: torch.dtype, products: Products) -> Iterator[Case]:
    def turn(scale: Any, hidden: Any, weight: Any, labels: Any) -> Any:
        return penstock.linear_cross_entropy_turn.default(
            scale, hidden, weight, None, labels, IGNORED_LABEL, True, products
        )

    for tokens in _LOSS_TOKENS:
        yield make(
            "head",
            name,
            turn,
            Operand((), torch.float32),
            Operand((tokens, _HIDDEN), dtype),
            Operand((_VOCABULARY, _HIDDEN), dtype),
            Operand((tokens,), torch.int64, below=_VOCABULARY),
        )


def _elementwise(make: _CaseMaker, name: str, dtype: torch.dtype) -> Iterator[Case]:
    for size in _MANY_BYTES:
        operand = Operand((size // (3 * dtype.itemsize),), dtype)
        yield make("pointwise", name, lambda x, y: (x + y, x * y), operand, operand)
        yield make("activation", name, _gelus, operand, operand)


def _gelus(x: Any, dy: Any) -> Any:
    """Both forms, forward and backward: which of them is faster differs between processors."""
    forward, backward = aten.gelu.default, aten.gelu_backward.default
    forms = ("none", "tanh")
    return [
        call
        for form in forms
        for call in (forward(x, approximate=form), backward(dy, x, approximate=form))
    ]


def _rows(make: _CaseMaker, name: str, dtype: torch.dtype) -> Iterator[Case]:
    """Work on rows: norm, reduction, lookup and copy, both ways each."""
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32

    def norm(x: Any, weight: Any, bias: Any, dy: Any) -> Any:
        shape = [_WIDTH]
        y, mean, scale = aten.native_layer_norm.default(x, shape, weight, bias, 1e-5)
        gradients = aten.native_layer_norm_backward.default(
            dy, x, shape, mean, scale, weight, bias, [True, True, True]
        )
        return y, gradients

    def copy(x: Any, y: Any) -> Any:
        return aten._to_copy.default(x, dtype=other), aten.cat.default([x, y], 1)

    def lookup(table: Any, places: Any, dy: Any) -> Any:
        found = aten.embedding.default(table, places)
        return found, aten.embedding_dense_backward.default(dy, places, len(table), -1, False)

    for size in _SOME_BYTES:
        rows = size // (2 * _WIDTH * dtype.itemsize)
        x, features = Operand((rows, _WIDTH), dtype), Operand((_WIDTH,), dtype)
        yield make("norm", name, norm, x, features, features, x)
        yield make("reduction", name, lambda x: aten.sum.dim_IntList(x, [0], True), x)
        yield make("copy", name, copy, x, x)
        yield make("lookup", name, lookup, x, Operand((rows,), torch.int64, below=rows), x)
