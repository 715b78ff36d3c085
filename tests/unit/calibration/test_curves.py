"""Measured points become curves of a machine; operators are counted by the cost model."""

from __future__ import annotations

import math

import pytest
import torch

from penstock.calibration.host_measurement import curves
from penstock.calibration.operator_cases import (
    DTYPES,
    SMALLEST_DIMENSIONS,
    Operand,
    Operands,
    amount_of,
    operator_cases,
    traced,
)
from penstock.calibration.repetitions import Measured, Quantity
from penstock.calibration.sparse_cases import SPARSITIES, Choices
from penstock.compiler import PRODUCTS, widens
from penstock.errors import ProgramError
from penstock.machines import IN_FLOPS

FLOAT = torch.float32


def point(work, size, *rates, part="engine", dtype="float32"):
    return Measured(Quantity(part, work, dtype), size, rates)


def test_points_of_a_curve_are_sorted_by_size():
    found = curves(
        [point("norm", 40, 4.0), point("copy", 3, 1.0), point("norm", 10, 1.0, 3.0, 2.0)], "engine"
    )
    assert [(c.work, c.sizes, c.rates) for c in found] == [
        ("norm", (10.0, 40.0), (2.0, 4.0)),
        ("copy", (3.0,), (1.0,)),
    ]


def test_spread_of_a_curve_is_that_of_its_worst_point():
    (found,) = curves([point("norm", 1, 9.0, 10.0, 11.0), point("norm", 2, 5.0, 10, 15)], "engine")
    assert found.spread == 0.5


def test_curves_are_those_of_one_part_and_one_type():
    measured = [
        point("copy", 1, 1.0),
        point("copy", 1, 2.0, part="store"),
        point("copy", 1, 3.0, dtype="bfloat16"),
        point("operator call", 1, 4.0),
    ]
    assert [c.rates for c in curves(measured, "engine")] == [(1.0,), (3.0,)]
    assert [c.rates for c in curves(measured, "store")] == [(2.0,)]
    assert curves(measured, "flash") == ()


def operator_work(products="torch"):
    return {
        (case.quantity.work, case.quantity.dtype, case.quantity.layout)
        for case in operator_cases(products, 2)
    }


@pytest.mark.parametrize("products", PRODUCTS)
def test_every_kind_of_an_engines_work_is_measured_in_its_types(products):
    works = ("attention", "head", "norm", "pointwise", "activation", "reduction", "lookup", "copy")
    expected = {(work, dtype, "any") for work in works for dtype in DTYPES}
    of_products = ("float32",) if widens(products) else DTYPES
    expected |= {("product", d, layout) for d in of_products for layout in ("features", "tokens")}
    assert operator_work(products) == expected


@pytest.mark.parametrize("products", ["torch", "onednn"])
def test_amounts_of_a_product_are_those_of_the_arithmetic(products):
    def both(x, weight, dy):
        return torch.mm(x, weight.t()), torch.mm(dy, weight)

    shapes = (512, 64), (256, 64), (512, 256)
    graph = traced(both, tuple(Operand(shape, FLOAT) for shape in shapes), products)
    targets = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert ("penstock.onednn_linear.default" in targets) == (products == "onednn")
    quantity = Quantity("engine", "product", "float32", "features")
    assert amount_of(quantity, graph) == (2 * 2 * 512 * 256 * 64, 64)


def test_amounts_of_elementwise_work_are_its_bytes():
    graph = traced(lambda x, y: (x + y, x * y), (Operand((1000,), FLOAT),) * 2, "torch")
    moved, size = amount_of(Quantity("engine", "pointwise", "float32"), graph)
    assert (moved, size) == (2 * 3 * 4000, 3 * 4000)


def test_work_that_the_cost_model_counts_otherwise_is_a_defect():
    graph = traced(lambda x, y: x + y, (Operand((8,), FLOAT),) * 2, "torch")
    with pytest.raises(ProgramError, match="expected add to be counted as norm float32, got point"):
        amount_of(Quantity("engine", "norm", "float32"), graph)


@pytest.mark.long
def test_sizes_of_prepared_cases_are_those_that_a_prediction_looks_up():
    sizes: dict[tuple[str, str, str], list[float]] = {}
    for case in operator_cases("torch", 2):
        quantity = case.quantity
        if quantity.dtype == "float32" and quantity.work not in ("attention", "head"):
            prepared = case.prepare()
            assert prepared.amount > 0
            key = (quantity.work, quantity.dtype, quantity.layout)
            sizes.setdefault(key, []).append(prepared.size)
    for (work, _, _), found in sizes.items():
        assert found == sorted(set(found)), work
        if work == "product":
            assert tuple(found) == SMALLEST_DIMENSIONS
        elif work not in IN_FLOPS:
            assert max(found) > 8 * min(found)


def test_operands_of_a_case_do_not_overlap():
    operands = Operands()
    wanted = (
        Operand((300, 5), FLOAT),
        Operand((7,), torch.bfloat16),
        Operand((1 << 21,), FLOAT),
        Operand((40,), torch.int64, below=9),
    )
    taken = operands.take(wanted)
    assert [(tuple(t.shape), t.dtype) for t in taken] == [(o.shape, o.dtype) for o in wanted]
    assert int(taken[3].max()) < 9
    taken[0].fill_(0)
    assert bool((taken[2] != 0).all())
    for tensor in taken[:3]:
        assert math.isfinite(float(tensor.float().sum()))


class Chooser:
    """Takes ten seconds for each choice, which names its sparsity."""

    def __init__(self) -> None:
        self.now, self.asked = 0.0, []

    def clock(self):
        return self.now

    def __call__(self, shape, dtype, sparsity, tokens):
        if shape[0] > 100:  # the little one compiles kernels only
            self.now += 10
            self.asked.append((dtype, sparsity))
        return sparsity


@pytest.mark.parametrize(("budget", "expected"), [(0, 1), (10, 1), (15, 2), (1000, 4)])
def test_sparse_choices_are_measured_while_their_budget_lasts(budget, expected):
    chooser = Chooser()
    choices = Choices(budget, clock=chooser.clock, choose=chooser)
    found = {sparsity: choices.of(FLOAT, sparsity) for sparsity in SPARSITIES}
    measured = list(SPARSITIES[:expected])
    assert [sparsity for _, sparsity in chooser.asked] == measured
    for sparsity, choice in found.items():
        assert abs(choice - sparsity) == min(abs(one - sparsity) for one in measured)


def test_each_type_has_a_sparse_choice_of_its_own():
    chooser = Chooser()
    choices = Choices(0, clock=chooser.clock, choose=chooser)
    for dtype in DTYPES.values():
        choices.of(dtype, 0.9)
        choices.of(dtype, 0.9)
    assert chooser.asked == [(dtype, 0.9) for dtype in DTYPES.values()]
