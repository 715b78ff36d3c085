"""Recipes of weights as bytes: the same bits when they are read, and a refusal of anything else."""

import json
from typing import Any

import pytest
import torch
from constructors import CUSTOM, OwnSeeds, real_tensors
from families import FAMILIES, plain_builder
from torch import nn

from penstock.compiler.serialization import MalformedError, NotSerializableError
from penstock.models import read_recipe, write_recipe
from penstock.models.deferred import record

BUILDS = {
    **{family: plain_builder(family) for family in FAMILIES},
    **{build.__name__: build for build in CUSTOM if build is not OwnSeeds},
}


@pytest.mark.parametrize("name", BUILDS)
def test_a_recipe_that_is_read_makes_the_weights_of_the_plain_model(name):
    build = BUILDS[name]
    recipe = record(build).recipe
    data = write_recipe(recipe)
    again = read_recipe(data)
    assert write_recipe(again) == data
    for seed in (0, 12345):
        torch.manual_seed(seed)
        expected = real_tensors(build())
        found = dict(again.materialise(seed))
        assert found.keys() == expected.keys()
        for tensor, reference in expected.items():
            assert found[tensor].dtype == reference.dtype
            assert found[tensor].stride() == reference.stride()
            assert torch.equal(found[tensor], reference), tensor
    for tensor in recipe.windows:
        assert again.draws([tensor]) == recipe.draws([tensor])


def test_generators_of_the_constructor_are_refused():
    with pytest.raises(NotSerializableError, match="random generator"):
        write_recipe(record(OwnSeeds).recipe)


def test_an_argument_without_a_written_form_is_refused():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, dtype=torch.float8_e4m3fn), False)

    with pytest.raises(NotSerializableError, match="float8"):
        write_recipe(record(Wide).recipe)


def content_of(data: bytes) -> tuple[Any, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def data_of(content: Any, rest: bytes) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + rest


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))


def set_at(content: Any, place: list[Any], value: Any) -> None:
    for step in place[:-1]:
        content = content[step]
    content[place[-1]] = value


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["leaves", 0, 0], 99),
        (["leaves", 0, 1], "float7"),
        (["leaves", 0, 2], [1000, 1000]),
        (["leaves", 0, 3], [1]),
        (["leaves", 0, 4], -1),
        (["leaves", 0], "7"),
        (["storages", 0], 1),
        (["tensors", 0, 1], 99),
        (["functions", 0], "aten::from_file.default"),
        (["functions", 0], "os.system"),
        (["functions", 0], "aten::nothing.default"),
        (["operations", 0, 0], 99),
        (["operations", 0, 1], 3),
        (["operations", 0, 2], [0, 0]),
        (["operations", 0, 3], [99]),
        (["operations", 0], []),
        (["operations", 0, 7], [0, "seed"]),
        (["constants"], {}),
        (["more"], 1),
    ],
    ids=str,
)
def test_what_is_no_recipe_is_refused(place, value):
    content, rest = content_of(write_recipe(record(small).recipe))
    set_at(content, place, value)
    with pytest.raises(MalformedError):
        read_recipe(data_of(content, rest))


@pytest.mark.parametrize("data", [b"", b"12345678", (5).to_bytes(8, "little") + b"[1,2]"])
def test_bytes_of_no_recipe_are_refused(data):
    with pytest.raises(MalformedError):
        read_recipe(data)
