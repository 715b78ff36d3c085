"""Products of weights on the simulated mesh, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sweeps import compiled, sweep, weights_of
from torch import nn
from torch.nn import functional as F

from penstock.engine import EnginePlan, TorchEngine, WaferEngine, plan_wafer
from penstock.engine.simulated_products import ProductSimulator
from penstock.wafer import SIM, Mesh, WaferOptions

OPTIONS = WaferOptions(Mesh(3, 4), SIM, "simulated")
ROUNDING = 2e-5  # of float32 sums of some dozens of terms, relative to the largest result


def near(found, wanted):
    return float((found - wanted).abs().max()) <= ROUNDING * float(wanted.abs().max())


def drawn(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_sparse", [False, True])
def test_products_are_those_of_torch_within_rounding(seed, is_sparse):
    simulator = ProductSimulator(OPTIONS)
    weight, x, dy = drawn(seed, 20, 14), drawn(seed + 10, 11, 14), drawn(seed + 20, 11, 20)
    mask = np.random.default_rng(seed).random((20, 14)) < 0.3 if is_sparse else None
    kept = torch.ones(20, 14) if mask is None else torch.from_numpy(mask).float()
    weight = weight * kept
    turned = None if mask is None else np.ascontiguousarray(mask.T)
    simulator.is_gradient = False
    assert near(simulator.product(x, weight.t(), turned), x @ weight.t())
    ahead = simulator.take_cycles()
    simulator.is_gradient = True
    assert near(simulator.product(dy, weight, mask), dy @ weight)
    assert near(simulator.weight_gradient(dy, x, mask), (dy.t() @ x) * kept)
    assert ahead > 0
    assert simulator.take_cycles() > 0
    assert simulator.take_cycles() == 0


class Net(nn.Module):
    """Linear layers with and without a bias, one with a transposed weight, one used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 24)
        self.middle = nn.Linear(24, 24, bias=False)
        self.turned = nn.Parameter(torch.randn(24, 10) / 5)
        self.last = nn.Linear(10, 12)

    def forward(self, x, y):
        x = torch.tanh(self.first(x))
        x = x + self.middle(self.middle(x))
        return F.cross_entropy(self.last(torch.tanh(x @ self.turned)), y, reduction="sum")


def steps(plan, program, wafer=None):
    micro_batches = [{"x": drawn(seed, 7, 8), "y": torch.arange(7) + seed} for seed in (0, 1)]
    engine = TorchEngine(program, plan) if wafer is None else WaferEngine(program, plan, wafer)
    found = sweep(engine, plan, weights_of(Net(), program), micro_batches)
    return engine, found


@pytest.mark.parametrize("recompute", [False, True])
def test_step_on_the_mesh_is_the_step_of_torch_within_rounding(recompute):
    program = compiled(Net(), {"x": torch.ones(7, 8), "y": torch.arange(7)})
    plan = EnginePlan(frozenset(range(len(program.stages) - 1)) if recompute else frozenset())
    engine, found = steps(plan, program, plan_wafer(program, OPTIONS))
    _, wanted = steps(plan, program)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
    assert set(found.gradients) == set(wanted.gradients)
    for name, gradient in wanted.gradients.items():
        assert near(found.gradients[name], gradient), name
    assert all(count.simulated > 0 for count in engine.counts)
    assert all(count.closed_form > 0 for count in engine.counts)
