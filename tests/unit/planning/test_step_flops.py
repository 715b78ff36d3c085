"""The operations of a step with sparse weights, against products that are counted by hand."""

import pytest
import torch
from torch import nn

from penstock.compiler import CompileOptions, compile_module
from penstock.planning.step_flops import StepFlops

ROWS, INPUTS, WIDTH = 64, 128, 32


class Model(nn.Module):
    """The gradient of `x` is not computed, so that `inlet` has two products, and `middle` three."""

    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(INPUTS, WIDTH, bias=False)
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.middle(torch.tanh(self.inlet(x))).square().mean()


def products_of(name, kept):
    return {"inlet.weight": 2, "middle.weight": 3}[name] * 2 * ROWS * kept


@pytest.fixture(scope="module")
def program():
    capacities = {"inlet.weight": INPUTS * WIDTH, "middle.weight": WIDTH * WIDTH}
    inputs = {"x": torch.zeros(ROWS, INPUTS)}
    return compile_module(Model(), inputs, CompileOptions(sparse=capacities))


@pytest.mark.parametrize("density", [1.0, 0.5, 0.1, 0.0])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_products_are_counted_by_the_entries_that_exist(program, density, micro_batches):
    capacities = {name: weight.capacity for name, weight in program.weights.items()}
    kept = {name: int(density * capacity) for name, capacity in capacities.items()}
    counted = StepFlops(program, micro_batches)
    rest = counted.of(capacities) - micro_batches * sum(
        products_of(name, capacity) for name, capacity in capacities.items()
    )
    assert rest >= 0
    expected = sum(products_of(name, count) for name, count in kept.items())
    assert counted.of(kept) == rest + micro_batches * expected
    dense = sum(2 * ROWS * (capacities[name] - count) for name, count in kept.items())
    assert counted.of(kept, True) == counted.of(kept) + micro_batches * dense
