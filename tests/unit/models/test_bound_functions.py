"""Functions with the module in their closure would read the original, not the copy."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.errors import CompileError
from penstock.models import InputSpec, ModelSource

SPEC = InputSpec((4,))


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


class WithALambda(Base):
    def __init__(self):
        super().__init__()
        self.act = lambda x: x @ self.linear.weight


class WithAHook(Base):
    def __init__(self):
        super().__init__()
        self.linear.register_forward_hook(lambda m, i, o: o @ self.linear.weight)


class WithAPatchedForward(Base):
    def __init__(self):
        super().__init__()
        forward = self.linear.forward
        self.linear.forward = lambda x: forward(x) * 2


class WithWhatIsCopied(Base):
    def __init__(self):
        super().__init__()
        half = 0.5
        self.act = lambda x: x * half
        self.again = functools.partial(self.forward)
        self.linear.register_forward_hook(self.hook)

    def hook(self, module, inputs, output):
        return output + self.linear.bias


def source(model, loss=F.mse_loss):
    return ModelSource.from_module(model, loss=loss, inputs={"x": SPEC}, targets={"target": SPEC})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (WithALambda, "act"),
        (WithAHook, "linear._forward_hooks"),
        (WithAPatchedForward, "linear.forward"),
    ],
)
def test_a_function_bound_to_its_module_is_refused_by_name(kind, name):
    with pytest.raises(CompileError, match=f"^{name} is a function, .*{kind.__name__}.*closure"):
        source(kind())


def test_methods_and_unbound_functions_are_accepted():
    assert source(WithWhatIsCopied()).shapes().keys() == {"linear.weight", "linear.bias"}


def test_a_loss_that_reads_the_models_weights_is_refused():
    model = Base()

    def loss(output, target):
        return F.mse_loss(output, target) + model.linear.weight.norm()

    with pytest.raises(CompileError, match=r"^the loss, .*loss at .*holds parts of the model"):
        source(model, loss)


def test_loss_with_own_tensors_is_accepted():
    weights = torch.ones(4)
    assert source(Base(), lambda output, target: ((output - target) ** 2 * weights).mean())


def test_a_loss_with_weights_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, output, target):
            return ((output - target) * self.scale).mean()

    with pytest.raises(CompileError, match=r"^the loss, Scaled, has weights of its own \(scale\)"):
        source(Base(), Scaled())
