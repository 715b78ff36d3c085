"""Tensors that require a gradient but are no parameters: PyTorch would not train them either."""

import pytest
import torch
from torch import nn

from penstock.errors import CompileError
from penstock.models import InputSpec, ModelSource
from penstock.models.unregistered import unregistered_weights
from penstock.planning.builders import compile_source


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4))


class Net(nn.Module):
    def __init__(self, change) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        change(self)


def cyclic_list(net):
    net.both = [parameter()]
    net.both.append(net.both)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda net: setattr(net, "rows", [parameter(), parameter()]), ["rows[0]", "rows[1]"]),
        (lambda net: setattr(net.part, "rows", ({"a": parameter()},)), ["part.rows[0]['a']"]),
        (
            lambda net: setattr(net, "layers", [nn.Linear(2, 2)]),
            ["layers[0].weight", "layers[0].bias"],
        ),
        (lambda net: net.register_buffer("scale", parameter()), ["scale"]),
        (lambda net: net.part.register_buffer("scale", parameter()), ["part.scale"]),
        (lambda net: setattr(net, "t", torch.ones(2, requires_grad=True)), ["t"]),
        (cyclic_list, ["both[0]"]),
    ],
    ids=["list", "nested", "modules", "buffer", "inner buffer", "attribute", "cycle"],
)
def test_tensors_that_no_optimizer_gets_are_named(change, names):
    net = Net(change)
    assert unregistered_weights(net) == names
    assert {id(p) for p in net.parameters()} == {id(p) for p in net.part.parameters()}


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "rows", nn.ParameterList([parameter()])),
        lambda net: setattr(net, "layers", nn.ModuleList([nn.Linear(2, 2)])),
        lambda net: setattr(net, "listed", [net.part.weight, net.part]),
        lambda net: setattr(net, "teacher", [nn.Linear(2, 2).requires_grad_(False)]),
        lambda net: setattr(net, "rows", [torch.ones(2)]),
        lambda net: net.register_buffer("scale", torch.ones(2)),
        lambda net: net.register_buffer("scale", None),
    ],
    ids=["parameters", "modules", "listed", "teacher", "constants", "buffer", "no buffer"],
)
def test_parameters_and_constants_are_not_named(change):
    assert unregistered_weights(Net(change)) == []


class Scaled(nn.Module):
    """Keeps a tensor in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.scales = nn.Linear(4, 4), [torch.full((4,), 0.5)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.part(x) * self.scales[0]).sum()


def compiled_source(source):
    return compile_source(source, micro_batch=2, length=1, precision="fp32")


def test_tensor_in_a_list_of_a_factory_is_refused_with_what_to_do():
    source = ModelSource.from_factory(f"{__name__}:Scaled", inputs={"x": InputSpec((4,))})
    with pytest.raises(CompileError) as caught:
        compiled_source(source)
    assert str(caught.value).endswith(
        "reads a tensor that the module does not register and the forward does not create, such "
        "as weight.data or a tensor in a list: the program would use one value for ever. Use "
        ".detach() instead of .data; keep weights in nn.ParameterList, layers in nn.ModuleList and "
        "constants in register_buffer instead of a list or mapping."
    )


def test_tensor_in_a_list_of_a_built_module_is_a_constant():
    source = ModelSource.from_module(Scaled(), inputs={"x": InputSpec((4,))})
    program = compiled_source(source)
    assert any(torch.equal(value, torch.full((4,), 0.5)) for value in program.constants.values())
    assert set(program.weights) == {"part.weight", "part.bias"}
