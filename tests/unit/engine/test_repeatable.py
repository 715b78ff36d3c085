"""A step on a GPU has a fixed order of sums, whatever else the process computes."""

from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

from penstock.compiler import CompileOptions, compile_module
from penstock.engine.repeatable import choose_repeatable_kernels

aten = torch.ops.aten
BACKWARDS = [
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
]


@pytest.fixture(autouse=True)
def deterministic_as_before():
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(was)


def program(*operators):
    """Return a program of one stage whose backward has these operators."""
    graph = fx.Graph()
    for operator in operators:
        graph.call_function(operator)
    kind = SimpleNamespace(digest="", graphs={"backward": graph})
    return SimpleNamespace(stages=[SimpleNamespace(kind=kind)])


@pytest.mark.parametrize("operator", ["recurrent_layer", "recurrent_layer_backward"])
def test_recurrent_layers_of_cudnn_are_off(operator, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", True)
    choose_repeatable_kernels(program(aten.mm.default))
    assert torch.backends.cudnn.enabled
    choose_repeatable_kernels(program(getattr(torch.ops.penstock, operator).default))
    assert not torch.backends.cudnn.enabled


def is_warning():
    assert torch.are_deterministic_algorithms_enabled()
    return torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize("backward", BACKWARDS, ids=["efficient", "flash"])
def test_attention_has_its_fixed_order_also_after_an_evaluation(backward):
    choose_repeatable_kernels(program(aten.mm.default, backward))
    assert not is_warning()
    choose_repeatable_kernels(program(aten.mm.default))  # forward alone
    assert not is_warning()


def test_other_operators_without_a_fixed_order_are_a_warning():
    cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    choose_repeatable_kernels(program(aten.max_pool2d_with_indices_backward.default, cpu))
    assert is_warning()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x * self.scale
        return nn.functional.scaled_dot_product_attention(x, x, x).square().mean()


def test_attention_of_cudnn_is_never_chosen(monkeypatch):
    """Its backward has no fixed order of sums; PyTorch chooses when a stage is traced."""
    chosen = []
    gradients = torch.autograd.grad

    def spy(*args, **kwargs):
        chosen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return gradients(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", spy)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    compile_module(Attention(), {"x": torch.randn(1, 2, 4, 8)}, CompileOptions())
    assert set(chosen) == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled()
