"""Deferred initialisation against the plain constructor: the same bits, one tensor at a time."""

import re
import subprocess
import sys

import pytest
import torch
from constructors import (
    CUSTOM,
    ConvNet,
    InitialisedTwice,
    OwnSeeds,
    RefusedFill,
    real_tensors,
)
from families import FAMILIES, plain_builder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten

from penstock.errors import CompileError, ConfigError
from penstock.models.deferred import record
from penstock.models.recording import _flattened


def assert_same_bits(build, seed: int) -> None:
    deferred = record(build)
    torch.manual_seed(seed)
    expected = real_tensors(build())
    torch.manual_seed(999)
    before = torch.get_rng_state()
    names = []
    for name, tensor in deferred.materialise(seed):
        assert torch.equal(torch.get_rng_state(), before), "the global random state changed"
        reference = expected[name]
        assert tensor.dtype == reference.dtype
        assert tensor.stride() == reference.stride()
        assert torch.equal(tensor, reference), f"{name} differs, seed {seed}"
        names.append(name)
    assert sorted(names) == sorted(expected)


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_initial_weights_of_the_plain_model(family: str, seed: int) -> None:
    assert_same_bits(plain_builder(family), seed)


@pytest.mark.parametrize("seed", [0, 5, 2**40 + 3])
@pytest.mark.parametrize("build", CUSTOM, ids=lambda build: build.__name__)
def test_custom_modules_have_the_initial_weights_of_the_plain_model(build, seed: int) -> None:
    assert_same_bits(build, seed)


def test_recording_does_not_change_the_global_random_state() -> None:
    before = torch.get_rng_state()
    record(OwnSeeds)
    assert torch.equal(torch.get_rng_state(), before)


def test_outside_generator_is_unchanged() -> None:
    generator = torch.Generator().manual_seed(11)

    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        nn.init.normal_(layer.weight, generator=generator)
        return layer

    first = dict(record(build).materialise(0))
    assert generator.initial_seed() == 11
    torch.manual_seed(0)
    assert torch.equal(first["weight"], build().weight)


def test_subset_of_names_gives_the_same_weights() -> None:
    deferred = record(ConvNet)
    torch.manual_seed(4)
    expected = real_tensors(ConvNet())
    for name in expected:
        [(got, tensor)] = deferred.materialise(4, [name])
        assert got == name
        assert torch.equal(tensor, expected[name])


def test_second_materialisation_gives_the_same_weights() -> None:
    deferred = record(OwnSeeds)
    first, second = dict(deferred.materialise(3)), dict(deferred.materialise(3))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = dict(deferred.materialise(4))
    assert not torch.equal(first["a"], other["a"])
    assert torch.equal(first["d"], other["d"])  # the constructor's own seed


def test_interleaved_replays_do_not_disturb_each_other() -> None:
    deferred = record(InitialisedTwice)
    expected = dict(deferred.materialise(1))
    mixed = zip(deferred.materialise(1), deferred.materialise(2), strict=True)
    for (name, tensor), _ in mixed:
        torch.rand(3)
        assert torch.equal(tensor, expected[name])


def test_tied_weights_appear_once_by_their_first_name() -> None:
    deferred = record(InitialisedTwice)
    assert deferred.aliases == {"last.weight": "layers.0.weight"}
    assert "last.weight" not in dict(deferred.materialise(0))
    gpt2 = record(plain_builder("gpt2"))
    assert gpt2.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert gpt2.module.lm_head.weight is gpt2.module.transformer.wte.weight


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=re.escape("the model has no tensor 'head.wieght' (did you mean 'head.weight'?)"),
    ):
        record(ConvNet).materialise(0, ["head.wieght"])


class ReadsRandom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.randn(3).sum().item()


class ReadsRandomAsArray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.randn(3).numpy().sum()


def test_reading_random_values_is_refused() -> None:
    with pytest.raises(CompileError) as caught:
        record(ReadsRandom)
    message = str(caught.value)
    assert "test_deferred.py:" in message
    assert "reads the values of random tensors" in message
    assert "build the model yourself and pass the nn.Module instead" in message
    with pytest.raises(CompileError, match=r"pass the nn.Module instead"):
        record(ReadsRandomAsArray)


def test_weights_from_before_the_constructor_are_refused() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(CompileError, match=r"^weight existed before the constructor ran"):
        record(lambda: layer)
    with pytest.raises(CompileError, match=r"writes .* into a tensor that existed before"):
        record(lambda: nn.init.zeros_(layer.weight))


def test_a_fill_that_pytorch_refuses_is_refused() -> None:
    with pytest.raises(RuntimeError, match="std"):
        RefusedFill()
    with pytest.raises(RuntimeError, match="std"):
        record(RefusedFill)


def test_the_constructor_must_return_a_module() -> None:
    with pytest.raises(CompileError, match=r"returns a torch.nn.Module, it returned tuple"):
        record(lambda: (nn.Linear(2, 2),))


PEAK = """
import resource
import torch
from torch import nn
from penstock.models.deferred import record

def build():
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(96)))
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.02)
    return layers

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

for _ in record(lambda: nn.Linear(1024, 1024)).materialise(0):  # first use of every kernel
    pass
start = peak()
deferred = record(build)
total = 0
for _, tensor in deferred.materialise(0):
    total += tensor.nbytes
print(total, peak() - start)
"""


@pytest.mark.long
def test_few_tensors_are_in_memory_at_a_time() -> None:
    """96 layers of 4 MiB, initialised twice: 384 MiB when whole, but never whole."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=120
    )
    total, peak = map(int, done.stdout.split())
    assert total > 96 * 1024 * 1024 * 4
    assert peak < 6 * 1024 * 1024 * 4


with FakeTensorMode():
    FAKE = torch.empty(2)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(2), 0.5, None), {"generator": None}),
        (([torch.ones(2), 1], (3, 4)), {"dtype": torch.float32}),
        ((torch.Size([2, 3]),), {}),
        ((nn.Parameter(torch.ones(2)), FAKE), {}),
        ((FAKE, torch.float32, True), {"generator": torch.Generator(), "out": FAKE}),
        ((torch.strided, torch.preserve_format), {"device": torch.device("cpu"), "name": "x"}),
        ((), {"z": 1, "a": 2}),
        ((FAKE,), {"z": [1], "a": 2}),
    ],
)
def test_arguments_are_flattened_as_by_pytorch(args, kwargs):
    flat, structure = _flattened(args, kwargs)
    expected, of_pytorch = tree_flatten((args, kwargs))
    assert structure == of_pytorch
    assert len(flat) == len(expected)
    assert all(one is other for one, other in zip(flat, expected, strict=True))
