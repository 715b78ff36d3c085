"""The choices of sparse products: which cases a program has, and their record."""

from __future__ import annotations

import json

import pytest
import torch
from sparse_steps import KERNELS, ONE_TILE, TILES, masks_of, pruned
from torch import nn

from penstock.engine import ProductCase, SparseProducts, measured_sparsity
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("sparsity", "measured"),
    [
        (0.0, 0.0), (0.024, 0.0), (0.026, 0.05), (0.88, 0.9), (0.9, 0.9), (0.94, 0.95),
        (0.95, 0.95), (0.954, 0.95), (0.956, 0.96), (0.98, 0.98), (0.994, 0.99), (1.0, 0.99),
    ],
)  # fmt: skip
def test_sparsities_are_rounded_to_those_that_are_measured(sparsity, measured):
    assert measured_sparsity(sparsity) == measured


class Two(nn.Module):
    """Two layers of one shape, and one that reads fewer tokens."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.embedding = nn.Embedding(5, 6)

    def forward(self, ids):
        x = self.a(self.embedding(ids))
        return (x.sum() + self.b(x[:, 0])).sum()


def program():
    masks = masks_of({"a.weight": (6, 6), "b.weight": (6, 6), "embedding.weight": (5, 6)})
    return pruned(Two(), {"ids": torch.zeros(3, 4, dtype=torch.int64)}, masks).program


def test_cases_are_the_shapes_tokens_and_sparsities_of_products():
    sparsities = {"a.weight": [0.5, 0.51, 0.9], "b.weight": [0.9], "embedding.weight": [0.9]}
    cases = SparseProducts().cases(program(), sparsities)
    assert set(cases) == {
        ProductCase((6, 6), torch.float32, 12, 0.5),
        ProductCase((6, 6), torch.float32, 12, 0.9),
        ProductCase((6, 6), torch.float32, 3, 0.9),
    }


def test_a_record_gives_the_same_choices_and_measures_nothing_again():
    answers = iter([KERNELS, TILES, ONE_TILE])
    asked = []

    def measure(*arguments):
        asked.append(arguments)
        return next(answers)

    products = SparseProducts(measure=measure)
    first = ProductCase((8, 4), torch.float32, 64, 0.9)
    second = ProductCase((8, 4), torch.bfloat16, 64, 0.96)
    told = []
    measured = products.measure([first, second, first], lambda *case: told.append(case))
    assert measured == {first: KERNELS, second: TILES}
    assert told == [(1, 2), (2, 2)]
    assert asked == [((8, 4), torch.float32, 0.9, 64), ((8, 4), torch.bfloat16, 0.96, 64)]
    record = json.loads(json.dumps(products.as_record()))
    resumed = SparseProducts.from_record(record, measure)
    assert resumed.measure([second, first]) == {}
    assert resumed.choice((8, 4), torch.float32, 64, 0.911) == KERNELS
    assert resumed.choice((8, 4), torch.bfloat16, 64, 0.9633) == TILES
    assert resumed.as_record() == products.as_record()
    third = ProductCase((8, 4), torch.float32, 64, 0.85)
    assert resumed.measure([third, first]) == {third: ONE_TILE}


def test_choices_that_are_added_replace_none_and_are_not_measured():
    first, second = (ProductCase((8, 4), torch.float32, tokens, 0.9) for tokens in (64, 128))
    products = SparseProducts({first: KERNELS}, measure=lambda *_: pytest.fail("measured"))
    products.add({first: TILES, second: ONE_TILE})
    assert products.measure([first, second]) == {}
    assert products.choice((8, 4), torch.float32, 64, 0.9) == KERNELS
    assert products.choice((8, 4), torch.float32, 128, 0.9) == ONE_TILE


def test_a_choice_that_was_not_measured_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"expected a recorded choice for 8 x 4 bfloat16, 7 tokens, sparsity 0\.9, got "
        r"choices for 0 other cases; measure every case",
    ):
        SparseProducts().choice((8, 4), torch.bfloat16, 7, 0.9)


@pytest.mark.parametrize("entry", [{}, {"shape": [1, 2], "dtype": "int8"}, {"shape": [1]}])
def test_a_record_of_another_kind_is_refused(entry):
    with pytest.raises(ConfigError, match=r"expected an entry of a record .* resume the run with"):
        SparseProducts.from_record([entry])
