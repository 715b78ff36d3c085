"""The price and the energy of a run: sums of devices and store, by the hour."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.prediction.run_price import RunPrice, price_of_engines, price_of_gpus


def part(price: float | None, watts: float | None) -> SimpleNamespace:
    return SimpleNamespace(price=price, watts=watts)


def test_engines_and_the_store_are_paid_by_the_hour():
    machine = SimpleNamespace(engine=part(10.0, 700.0), store=part(6.0, 4600.0))
    price = price_of_engines(machine, 8)
    assert price == RunPrice(86.0, 10_200.0)
    assert price.dollars(90 * 60) == pytest.approx(129.0)
    assert price.kilowatt_hours(90 * 60) == pytest.approx(15.3)


@pytest.mark.parametrize(
    ("engine", "store", "expected"),
    [(10.0, None, 20.0), (None, 6.0, 6.0), (None, None, None), (0.0, None, 0.0)],
)
def test_unknown_prices_are_left_out_and_none_is_known_if_all_are_unknown(engine, store, expected):
    machine = SimpleNamespace(engine=part(engine, engine), store=part(store, store))
    price = price_of_engines(machine, 2)
    assert (price.dollars_per_hour, price.watts) == (expected, expected)
    assert (price.dollars(3600) is None) == (price.kilowatt_hours(3600) is None)
    assert (price.dollars(3600) is None) == (expected is None)


def test_gpus_are_paid_by_the_hour():
    cluster = SimpleNamespace(gpu=part(2.5, None))
    assert price_of_gpus(cluster, 16) == RunPrice(40.0, None)
