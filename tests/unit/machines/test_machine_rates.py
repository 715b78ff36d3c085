"""Rates between measured sizes, and which curve is used for which work."""

from typing import get_args

import numpy as np
import pytest
from pydantic import ValidationError

from penstock.machines import (
    IN_FLOPS,
    EnginePart,
    RateCurve,
    RateTable,
    Work,
    operator_seconds,
)
from penstock.machines.description import ENGINE_WORK, FLASH_WORK, PROCESS_WORK, STORE_WORK
from penstock.operator_cost import OperatorCost


def random_curve(seed):
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 8))
    sizes = np.cumsum(10 ** random.uniform(-2, 4, count))
    rates = 10 ** random.uniform(6, 15, count)
    return RateCurve(work="pointwise", sizes=tuple(sizes), rates=tuple(rates))


@pytest.mark.parametrize("seed", range(20))
def test_rates_are_straight_between_sizes_in_logarithms(seed):
    curve = random_curve(seed)
    logs = np.log(curve.sizes)
    asked = np.random.default_rng(seed + 1000).uniform(logs[0] - 3, logs[-1] + 3, 50)
    expected = np.exp(np.interp(asked, logs, np.log(curve.rates)))
    got = [curve.at(float(size)) for size in np.exp(asked)]
    np.testing.assert_allclose(got, expected, rtol=1e-9, err_msg=f"seed {seed}")


def test_rate_at_a_given_size_is_the_given_rate_and_constant_beyond_the_ends():
    curve = RateCurve(work="product", sizes=(64, 256, 1024), rates=(1e11, 3e11, 2e11))
    assert [curve.at(size) for size in (1, 64, 1024, 1e9)] == [1e11, 1e11, 2e11, 2e11]
    assert curve.at(256) == pytest.approx(3e11)
    assert curve.at(128) == pytest.approx((1e11 * 3e11) ** 0.5)


def test_curve_of_one_rate_has_that_rate_at_every_size():
    curve = RateCurve(work="update", rates=(5e9,))
    assert {curve.at(size) for size in (1e-3, 1, 1e12)} == {5e9}


def table(*curves):
    return RateTable([RateCurve(rates=(float(n + 1),), **c) for n, c in enumerate(curves)], "it")


@pytest.mark.parametrize("layout", ["any", "features", "tokens"])
def test_type_counts_more_than_layout(layout):
    rates = table(
        {"work": "product", "dtype": "float32", "layout": "features"},
        {"work": "product", "dtype": "float32", "layout": "tokens"},
        {"work": "product", "dtype": "bfloat16", "layout": "tokens"},
    )
    for work in ("product", "head", "attention"):
        assert rates.curve(work, "bfloat16", layout).rates == (3.0,)
        assert rates.curve(work, "8bit", layout).rates == (2.0 if layout == "tokens" else 1.0,)


def test_curve_of_type_and_layout_precedes_layout_any_and_type_any():
    rates = table(
        {"work": "product"},
        {"work": "product", "dtype": "float32"},
        {"work": "product", "dtype": "float32", "layout": "tokens"},
        {"work": "product", "layout": "features"},
    )
    found = {
        (dtype, layout): rates.curve("product", dtype, layout).rates[0]
        for dtype in ("float32", "bfloat16")
        for layout in ("tokens", "features")
    }
    assert found == {
        ("float32", "tokens"): 3,
        ("float32", "features"): 2,
        ("bfloat16", "tokens"): 1,
        ("bfloat16", "features"): 4,
    }


@pytest.mark.parametrize(
    ("work", "stand_in"),
    [
        ("attention", "product"),
        ("head", "product"),
        ("sparse product", "product"),
        ("norm", "pointwise"),
        ("activation", "pointwise"),
        ("reduction", "pointwise"),
        ("lookup", "pointwise"),
        ("copy", "pointwise"),
        ("receive", "update"),
    ],
)
def test_work_without_a_curve_has_the_rate_of_similar_work(work, stand_in):
    rates = table({"work": stand_in})
    assert rates.curve(work).work == stand_in
    assert not rates.has(work)
    own = table({"work": stand_in}, {"work": work})
    assert own.curve(work).work == work
    assert own.has(work)
    assert (work in IN_FLOPS) == (stand_in in IN_FLOPS)  # or the rate would have another unit


def sparse_cost(density, *, tokens=4096, outputs=512, inputs=256):
    flops = round(2 * density * tokens * 512 * 256)
    return OperatorCost(
        "sparse_linear", "sparse product", "float32", "any", density, flops, 0, 1,
        "forward" if outputs else "", outputs, inputs,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sides", "rate"),
    [
        ({}, 4e11),  # at 256 inputs
        ({"tokens": 64}, 1e11),  # at 64 tokens
        ({"outputs": 0, "inputs": 0}, 8e11),  # of an unknown weight: at the largest size
    ],
    ids=["smallest side", "few tokens", "unknown weight"],
)
def test_sparse_product_without_a_curve_has_the_rate_of_dense_products_of_its_dimensions(
    sides, rate
):
    products = {"work": "product", "sizes": [64, 256, 1024], "rates": [1e11, 4e11, 8e11]}
    pointwise = {"work": "pointwise", "rates": [1e11]}
    engine = EnginePart.model_validate({"is_host": True, "rates": [products, pointwise]})
    for density in (0.5, 0.1):
        cost = sparse_cost(density, **sides)
        assert operator_seconds(cost, engine) == pytest.approx(cost.flops / rate)
    own = {"work": "sparse product", "sizes": [0.1, 0.5], "rates": [2e10, 3e10]}
    engine = EnginePart.model_validate({"is_host": True, "rates": [products, pointwise, own]})
    cost = sparse_cost(0.5, **sides)
    assert operator_seconds(cost, engine) == pytest.approx(cost.flops / 3e10)


def test_sparse_product_without_a_curve_is_faster_than_the_dense_one():
    products = {"work": "product", "sizes": [64, 1024], "rates": [1e11, 8e11]}
    pointwise = {"work": "pointwise", "rates": [1e11]}
    engine = EnginePart.model_validate({"is_host": True, "rates": [products, pointwise]})
    dense = OperatorCost("mm", "product", "float32", "features", 256.0, 2 * 4096 * 512 * 256, 0)
    seconds = [operator_seconds(cost, engine) for cost in (dense, sparse_cost(0.5))]
    assert seconds[1] == pytest.approx(seconds[0] / 2)


@pytest.mark.parametrize("work", ["attention", "head"])
def test_attention_and_head_without_a_curve_have_the_rate_of_products_of_as_many_tokens(work):
    products = {"work": "product", "sizes": [64, 1024], "rates": [1e11, 8e11]}
    pointwise = {"work": "pointwise", "rates": [1e11]}
    engine = EnginePart.model_validate({"is_host": True, "rates": [products, pointwise]})
    for tokens, rate in ((16, 1e11), (64, 1e11), (4096, 8e11)):
        cost = OperatorCost("op", work, "float32", "any", float(tokens), 10**12, 0)
        assert operator_seconds(cost, engine) == pytest.approx(1e12 / rate)


def test_store_without_a_curve_of_copies_copies_at_the_rate_of_updates():
    assert table({"work": "update"}).curve("copy").work == "update"


def test_work_of_another_type_takes_the_curve_of_similar_work_of_its_type():
    rates = table(
        {"work": "attention", "dtype": "bfloat16"}, {"work": "product", "dtype": "float32"}
    )
    assert rates.curve("attention", "float32").work == "product"


def test_work_without_any_rate_is_an_error_that_names_part_work_and_type():
    with pytest.raises(KeyError, match="it gives no rate for flash read of any"):
        table({"work": "product"}).curve("flash read")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"rates": (1.0, 2.0)}, "expected one rate per size, got 2 for 1; add or remove some"),
        ({"rates": (0.0,)}, "expected numbers above 0, got 0; correct or remove it"),
        (
            {"sizes": (4.0, 4.0), "rates": (1.0, 1.0)},
            "expected ascending sizes, got 4, 4; order sizes and rates alike, each size once",
        ),
    ],
)
def test_curve_created_in_python_is_checked(values, text):
    with pytest.raises(ValidationError) as raised:
        RateCurve(work="copy", **values)
    assert text in [problem["msg"] for problem in raised.value.errors()]


def test_every_kind_of_work_belongs_to_a_part_whose_required_curves_give_its_rate():
    parts = {
        ENGINE_WORK: table({"work": "product"}, {"work": "pointwise"}),
        STORE_WORK: table({"work": "update"}),
        FLASH_WORK: table({"work": "flash read"}, {"work": "flash write"}),
        PROCESS_WORK: table({"work": "shared memory"}, {"work": "socket"}),
    }
    assert {work for part in parts for work in part} == set(get_args(Work))
    for part, rates in parts.items():
        for work in part:
            assert rates.curve(work).rates[0] > 0
