"""GELU in executables: by a kernel on the CPU, by PyTorch elsewhere."""

import pytest
import torch
from sweeps import compiled, one_step
from torch import nn
from torch.nn import functional

from penstock.compiler import gelu_tanh, gelu_tanh_backward, operator_costs
from penstock.kernels import gelu as gelu_kernels

aten = torch.ops.aten


class Activated(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 40), nn.Linear(40, 3)

    def forward(self, x):
        return self.second(functional.gelu(self.first(x), approximate="tanh")).square().sum()


def targets(program, executable):
    return [n.target for stage in program.stages for n in stage.kind.graphs[executable].nodes]


def test_every_executable_calls_the_kernel_and_costs_are_those_of_the_operator():
    program = compiled(Activated(), {"x": torch.randn(4, 8)})
    for name in ("forward", "infer", "turn"):
        assert gelu_tanh in targets(program, name)
        assert aten.gelu.default not in targets(program, name)
    for name in ("turn", "recompute", "backward"):
        assert gelu_tanh_backward in targets(program, name)
        assert aten.gelu_backward.default not in targets(program, name)
    costs = {cost.name for stage in program.stages for cost in stage.kind.costs["turn"]}
    assert {"gelu", "gelu_backward"} <= costs


def test_step_has_the_gradients_of_pytorch():
    module = Activated()
    rows = {"x": torch.randn(16, 8, generator=torch.Generator().manual_seed(1))}
    step = one_step(module, [rows])
    loss = module(**rows)
    loss.backward()
    assert step.losses[0] == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)


def transposed(x):
    return x.t()


def in_float64(x):
    return x.double()


@pytest.mark.parametrize("changed", [transposed, in_float64])
def test_tensors_without_a_kernel_go_to_pytorch(changed, monkeypatch):
    for name in ("gelu", "gelu_backward"):
        monkeypatch.setattr(gelu_kernels, name, None)
    x, gradient = changed(torch.randn(5, 7)), changed(torch.randn(5, 7))
    assert torch.equal(gelu_tanh(x), functional.gelu(x, approximate="tanh"))
    expected = aten.gelu_backward.default(gradient, x, approximate="tanh")
    assert torch.equal(gelu_tanh_backward(gradient, x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_several_dimensions_and_none_are_as_in_pytorch(dtype):
    tolerance = {"rtol": 2**-7, "atol": 2**-8} if dtype == torch.bfloat16 else {}
    for shape in ((2, 3, 5), (1,), (0, 4)):
        x, gradient = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        expected = functional.gelu(x, approximate="tanh")
        torch.testing.assert_close(gelu_tanh(x), expected, **tolerance)
        expected = aten.gelu_backward.default(gradient, x, approximate="tanh")
        torch.testing.assert_close(gelu_tanh_backward(gradient, x), expected, **tolerance)


def test_executable_costs_what_the_operators_cost_that_it_calls_functions_for():
    program = compiled(Activated(), {"x": torch.randn(4, 8)})
    found = []
    for stage in program.stages:
        for name, graph in stage.kind.graphs.items():
            costs, again = stage.kind.costs[name], operator_costs(graph)
            expected = [cost for cost in costs if cost.work == "activation"]
            assert [cost for cost in again if cost.work == "activation"] == expected, name
            found += expected
    assert found
