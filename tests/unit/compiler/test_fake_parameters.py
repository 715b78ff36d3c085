"""Fake parameters that an export copies directly are those of its general conversion."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import _trace
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.compiler.capture import capture
from penstock.compiler.fake_parameters import _copy_simple, simple_copies
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


def with_gradient() -> dict[str, torch.Tensor]:
    trained = weight(3)
    trained.grad = torch.empty(3)
    return {"trained": trained}


def with_gradient_of_another_type() -> dict[str, torch.Tensor]:
    odd = weight(3)
    odd.grad_dtype = torch.float64
    return {"odd": odd}


SIMPLE: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "plain": lambda: {"weight": weight(3, 4), "bias": weight(4), "table": torch.arange(6)},
    "types": lambda: {"halved": weight(3, dtype=torch.bfloat16), "mask": torch.ones(2) > 0},
    "frozen": lambda: {"weight": nn.Parameter(torch.empty(3), requires_grad=False)},
    "number": lambda: {"scale": weight()},
    "empty": lambda: {"none": weight(0, 3)},
    "tied": tied,
    "attribute": with_attribute,
}
OTHERS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "view": lambda: {"table": torch.empty(6).view(2, 3)},
    "transposed": lambda: {"weight": nn.Parameter(torch.empty_strided((3, 4), (1, 3)))},
    "one row": lambda: {"positions": torch.empty_strided((1, 6), (1, 1))},
    "part": lambda: {"weight": nn.Parameter(torch.empty(6, 4)[2:4].detach())},
    "expanded": lambda: {"table": torch.empty(1, 4).expand(3, 4)},
    "conjugated": lambda: {"table": torch.empty(3, dtype=torch.complex64).conj()},
    "of one memory": of_one_memory,
    "data of one memory": data_of_one_memory,
    "gradient": with_gradient,
    "gradient of another type": with_gradient_of_another_type,
    "result": lambda: {"table": weight(3) * 2},
    "sparse": lambda: {"table": torch.eye(3).to_sparse()},
}
CASES = SIMPLE | OTHERS


def described(converted: Mapping[str, torch.Tensor]) -> list[Any]:
    """All metadata, and which tensors are one and which share their memory."""
    tensors = list(converted.values())
    objects = [id(tensor) for tensor in tensors]
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
    memories = [storage_of(tensor) for tensor in strided]
    return [
        (
            name,
            type(tensor),
            isinstance(tensor, nn.Parameter),
            tuple(tensor.shape),
            tensor.layout,
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            tensor.is_leaf,
            tensor.grad_dtype if tensor.is_leaf else None,
            tensor.grad is None if tensor.is_leaf else None,
            tensor._is_view(),
            tensor.is_conj(),
            tensor.is_inference(),
            sorted(vars(tensor)),
            objects.index(id(tensor)),
        )
        for name, tensor in converted.items()
    ] + [
        (
            tensor.stride(),
            tensor.storage_offset(),
            tensor.untyped_storage().nbytes(),
            memories.index(storage_of(tensor)),
        )
        for tensor in strided
    ]


def module_of(name: str, *, is_fake: bool) -> Holder:
    if not is_fake:
        return Holder(CASES[name])
    with FakeTensorMode():
        return Holder(CASES[name])


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def copied(mode: FakeTensorMode, module: nn.Module) -> Mapping[str, torch.Tensor]:
    with simple_copies():
        return _trace._fakify_params_buffers(mode, module)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # by the conversion of a result
@pytest.mark.parametrize("is_fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize("name", CASES)
def test_copies_are_those_of_the_conversion(name, is_fake):
    module = module_of(name, is_fake=is_fake)
    general, own = FakeTensorMode(), FakeTensorMode()
    wanted = _trace._fakify_params_buffers(general, module)
    made = copied(own, module)
    assert described(made) == described(wanted)
    assert all(tensor.fake_mode is own for tensor in made.values())
    for key, tensor in own_tensors(module).items():
        assert own.from_tensor(tensor) is made[key]


@pytest.mark.parametrize("name", CASES)
def test_only_simple_tensors_are_copied(name):
    copies = _copy_simple(FakeTensorMode(), module_of(name, is_fake=True))
    assert bool(copies) == (name in SIMPLE)


def test_tensors_of_another_mode_of_inference_are_converted():
    with torch.inference_mode(), FakeTensorMode():
        module = Holder(CASES["plain"])
    assert not _copy_simple(FakeTensorMode(), module)


def test_copies_under_inference_mode_are_ordinary_tensors():
    module = module_of("plain", is_fake=True)
    with torch.inference_mode():
        made = copied(FakeTensorMode(), module)
    assert not any(tensor.is_inference() for tensor in made.values())


def test_copies_are_made_outside_of_the_modes_of_the_caller():
    class Seen(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    module = module_of("plain", is_fake=True)
    with Seen():
        copied(FakeTensorMode(), module)
    assert Seen.names == []


def test_tensors_that_share_memory_with_a_copy_share_it_after_the_conversion():
    module = module_of("plain", is_fake=True)
    mode = FakeTensorMode()
    made = copied(mode, module)
    weight = module.get_parameter("weight")
    for other in (weight.data, weight.detach()[:2]):
        assert storage_of(mode.from_tensor(other)) == storage_of(made["weight"])


@pytest.mark.parametrize("part", [lambda t: t, lambda t: t.data], ids=["itself", "its data"])
def test_a_tensor_that_the_mode_knows_is_not_copied(part):
    """An example input of an export may be a parameter, or share its memory."""
    module = module_of("plain", is_fake=True)
    mode = FakeTensorMode()
    known = mode.from_tensor(part(module.get_parameter("weight")))
    made = copied(mode, module)
    assert storage_of(made["weight"]) == storage_of(known)


def test_the_conversion_is_put_back_after_an_error():
    convert = _trace._fakify_params_buffers
    with pytest.raises(ZeroDivisionError), simple_copies():
        1 / 0  # noqa: B018
    assert _trace._fakify_params_buffers is convert


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


class OfItsInput(nn.Module):
    """Reads a weight that is its input too."""

    def __init__(self) -> None:
        super().__init__()
        self.w = weight(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w).sum() * (2.0 if x is self.w else 1.0)


def test_an_input_that_is_a_weight_is_that_weight():
    with FakeTensorMode():
        module = OfItsInput()
    numbers = [
        node.args[1]
        for node in capture(module, {"x": module.w}).graph.nodes
        if node.target is torch.ops.aten.mul.Tensor
    ]
    assert numbers == [2.0]


def test_threads_export_one_at_a_time():
    convert = _trace._fakify_params_buffers

    def export(_: int) -> None:
        with FakeTensorMode() as mode:
            module, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.empty(2, 4)
        del mode
        capture(Summed(module), {"x": x})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(export, range(8)))
    assert _trace._fakify_params_buffers is convert


class Summed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum()
