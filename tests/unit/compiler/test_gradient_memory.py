"""Gradients that autograd returns as views, shared or without gaps, are right over micro-batches.

Sums over micro-batches are made in place. A gradient that shares memory with another one, or with
a value's gradient on its way down, would then be added to twice or change under its reader.
"""

import pytest
import torch
from sweeps import compiled, one_step
from torch import nn

from penstock.engine import EnginePlan


class Shift(nn.Module):
    """Two weights of the values' own shape: their gradients, and that of x, are one tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift, self.other = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))

    def forward(self, x):
        return self.linear(x) + self.shift + self.other


class Shifted(nn.Module):
    """Blocks of it, and a weight whose gradient is a single number repeated."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Shift() for _ in range(3))
        self.summed = nn.Parameter(torch.randn(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().sum() + self.summed.sum()


class Turned(nn.Module):
    """Values leave each block transposed, so that they cross stages with gaps between rows."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x.reshape(4, 4)).view(2, 2, 4).transpose(0, 2)
        return (x * torch.arange(16.0).view(4, 2, 2)).square().sum()


class Repeated(nn.Module):
    """A sum as the loss: the gradient that comes down is one number, expanded."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).view(2, 2, 4).flatten(0, 1)
        return x.sum()


@pytest.mark.parametrize("recompute", [(), (0, 1)], ids=["kept", "made again"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(("model", "rows"), [(Shifted, 3), (Turned, 4), (Repeated, 4)])
def test_gradients_equal_pytorch(model, rows, count, recompute):
    torch.manual_seed(count)
    module = model()
    batches = [{"x": torch.randn(rows, 4)} for _ in range(count)]
    step = one_step(module, batches, EnginePlan(frozenset(recompute)))
    for batch, loss in zip(batches, step.losses, strict=True):
        expected = module(**batch)
        expected.backward()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    for name, parameter in module.named_parameters():
        assert torch.allclose(step.gradients[name], parameter.grad, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize(("model", "rows"), [(Shifted, 3), (Turned, 4), (Repeated, 4)])
def test_values_between_stages_are_contiguous_and_gradients_share_no_memory(model, rows):
    program = compiled(model(), {"x": torch.randn(rows, 4)})
    for stage in program.stages:
        kind = stage.kind
        weights = [torch.randn(w.shape) for w in kind.weights]
        inputs = [torch.randn(x.shape) for x in kind.inputs]
        tangents = [torch.randn(o.shape) for o in kind.outputs]
        results = kind.turn(*weights, *inputs, torch.tensor(0), *tangents)
        assert all(t.is_contiguous() for t in results if t is not None)
        gradients = results[len(kind.outputs) + sum(kind.inputs_grad) :]
        others = [*weights, *inputs, *tangents, *results[: -len(gradients) or None]]
        places = [t.untyped_storage().data_ptr() for t in gradients]
        assert len(set(places)) == len(places)
        assert not {t.untyped_storage().data_ptr() for t in others if t is not None} & set(places)
