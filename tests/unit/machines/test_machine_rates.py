"""Rates between measured sizes, and which curve is used for which work."""

from typing import get_args

import numpy as np
import pytest
from pydantic import ValidationError

from penstock.machines import IN_FLOPS, RateCurve, RateTable, Work
from penstock.machines.description import ENGINE_WORK, FLASH_WORK, PROCESS_WORK, STORE_WORK


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
