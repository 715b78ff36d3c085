"""Fake parameters that an export copies directly are those of its general conversion."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import _trace

from penstock.compiler.fake_parameters import simple_copies
from penstock.compiler.tensors import storage_of


class Holder(nn.Module):
    """A module with the tensors that `make` returns, as parameters if they require a gradient."""

    def __init__(self, make: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        super().__init__()
        for name, tensor in make().items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


def weight(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, **options))


def tied() -> dict[str, torch.Tensor]:
    first = weight(3, 4)
    return {"first": first, "second": first}


def of_one_memory() -> dict[str, torch.Tensor]:
    memory = torch.empty(12)
    return {"whole": memory, "again": memory.view(3, 4), "row": memory[4:8]}


def data_of_one_memory() -> dict[str, torch.Tensor]:
    first = weight(12)
    return {"first": first, "second": nn.Parameter(first.data)}


def with_attribute() -> dict[str, torch.Tensor]:
    marked = weight(3)
    marked.no_decay = True  # type: ignore[attr-defined]
    return {"marked": marked}


CASES: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "plain": lambda: {"weight": weight(3, 4), "bias": weight(4), "table": torch.arange(6)},
    "types": lambda: {"halved": weight(3, dtype=torch.bfloat16), "mask": torch.ones(2) > 0},
    "frozen": lambda: {"weight": nn.Parameter(torch.empty(3), requires_grad=False)},
    "number": lambda: {"scale": weight()},
    "empty": lambda: {"none": weight(0, 3)},
    "transposed": lambda: {"weight": nn.Parameter(torch.empty(3, 4).t())},
    "part": lambda: {"weight": nn.Parameter(torch.empty(6, 4)[2:4])},
    "one row": lambda: {"positions": torch.arange(6).expand(1, -1).detach()},
    "expanded": lambda: {"table": torch.empty(1, 4).expand(3, 4)},
    "tied": tied,
    "of one memory": of_one_memory,
    "data of one memory": data_of_one_memory,
    "attribute": with_attribute,
}


def described(converted: Mapping[str, torch.Tensor]) -> list[Any]:
    """All metadata, and which tensors are one and which share their memory."""
    tensors = list(converted.values())
    objects = [id(tensor) for tensor in tensors]
    memories = [storage_of(tensor) for tensor in tensors]
    return [
        (
            name,
            type(tensor),
            isinstance(tensor, nn.Parameter),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.untyped_storage().nbytes(),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            tensor.is_leaf,
            tensor._is_view(),
            sorted(vars(tensor)),
            objects.index(id(tensor)),
            memories.index(storage_of(tensor)),
        )
        for name, tensor in converted.items()
    ]


def is_same(mode: FakeTensorMode, module: nn.Module, converted: Mapping[str, Any]) -> bool:
    """Whether the mode takes these tensors for the module's from now on."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return all(mode.from_tensor(own[name]) is converted[name] for name in own)


@pytest.mark.parametrize("is_fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize("name", CASES)
def test_copies_are_those_of_the_conversion(name, is_fake):
    if is_fake:
        with FakeTensorMode():
            module = Holder(CASES[name])
    else:
        module = Holder(CASES[name])
    general, own = FakeTensorMode(), FakeTensorMode()
    wanted = _trace._fakify_params_buffers(general, module)
    with simple_copies():
        made = _trace._fakify_params_buffers(own, module)
    assert described(made) == described(wanted)
    assert all(tensor.fake_mode is own for tensor in made.values())
    assert is_same(own, module, made) == is_same(general, module, wanted)


def test_simple_tensors_are_not_described(monkeypatch):
    with FakeTensorMode():
        module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))

    def describe_all() -> int:
        mode = FakeTensorMode()
        describer = mode.fake_tensor_converter.meta_converter.describer
        describe, seen = describer.describe_tensor, []
        monkeypatch.setattr(
            describer,
            "describe_tensor",
            lambda tensor, **options: seen.append(tensor) or describe(tensor, **options),
        )
        _trace._fakify_params_buffers(mode, module)
        return len(seen)

    assert describe_all() == 8
    with simple_copies():
        assert describe_all() == 0
