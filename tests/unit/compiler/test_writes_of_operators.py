"""Operators that write in place inside, forward or backward, have PyTorch's gradients."""

import pytest
import torch
from sweeps import compiled, sweep, weights_of
from torch import nn
from torch.nn import functional as F

from penstock.compiler.functional import writes
from penstock.compiler.serialization import deserialize, serialize
from penstock.engine import EnginePlan, TorchEngine


def upper_part(x):
    q, r = torch.linalg.qr(x.T)
    return (q * torch.arange(4.0)).sum() + r.pow(3).sum()


OPERATORS = {
    "rfft": lambda x: torch.fft.rfft(x).real,
    "irfft of rfft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 1.5, n=8),
    "qr": upper_part,
    "rms_norm": lambda x: F.rms_norm(x, (8,)).pow(3),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "binary cross-entropy": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(4, 8)),
    "cumprod": lambda x: x.cumprod(1),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
}


class Applies(nn.Module):
    def __init__(self, operator):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.operator = operator

    def forward(self, x):
        return self.operator(self.second(torch.tanh(self.first(x)))).square().mean()


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_gradients_of_an_operator_that_writes_inside_equal_pytorch(operator):
    module = Applies(operator)
    rows = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(1))}
    program = compiled(module, rows)
    executables = [g for stage in program.stages for g in stage.kind.graphs.values()]
    assert not any(writes(node) for graph in executables for node in graph.nodes)
    module(**rows).backward()
    everything = frozenset(stage.index for stage in program.stages)
    for plan in (EnginePlan(), EnginePlan(recompute=everything)):
        for made in (program, deserialize(serialize(program))):
            step = sweep(TorchEngine(made, plan), plan, weights_of(module, made), [rows])
            for name, parameter in module.named_parameters():
                torch.testing.assert_close(step.gradients[name], parameter.grad, msg=name)
