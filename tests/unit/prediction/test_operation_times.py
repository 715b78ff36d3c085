"""The costs of a step against sums by hand, on a machine with round figures."""

import pytest
from store_programs import make_program

from penstock.machines import EnginePart, MachineDescription, operator_seconds, sum_seconds
from penstock.operator_cost import OperatorCost
from penstock.prediction.operation_times import update_bytes
from penstock.prediction.step_tasks import Arrangement
from penstock.store import AdamW

FAST = 1e12


def engine(**changes):
    rates = [
        {"work": "product", "rates": [100.0]},
        {"work": "pointwise", "rates": [10.0]},
        {"work": "product", "dtype": "bfloat16", "layout": "tokens", "rates": [25.0]},
    ]
    return EnginePart.model_validate({"is_host": True, "rates": rates, **changes})


def cost(work="product", flops=0, moved=0, **changes):
    fields = {"dtype": "float32", "layout": "any", "size": 1.0, **changes}
    return OperatorCost("op", work, flops=flops, bytes=moved, **fields)


@pytest.mark.parametrize(
    ("operator", "seconds"),
    [
        (cost(flops=1000, moved=1), 10.0),  # bound by arithmetic
        (cost(flops=1000, moved=500), 50.0),  # bound by memory
        (cost("norm", moved=30), 3.0),  # no curve of its own: that of pointwise work
        (cost("attention", flops=200), 2.0),  # likewise: that of products
        (cost(flops=100, dtype="bfloat16", layout="tokens"), 4.0),
        (cost(flops=100, dtype="bfloat16", layout="features"), 1.0),
        (cost("pointwise", moved=10, calls=4), 4.0),
    ],
)
def test_operator_takes_the_time_of_its_arithmetic_or_of_its_traffic(operator, seconds):
    assert operator_seconds(operator, engine()) == pytest.approx(seconds)


def test_every_call_of_an_operator_takes_the_time_of_a_call_too():
    with_calls = engine(operator_seconds=0.5)
    assert operator_seconds(cost("pointwise", moved=10, calls=4), with_calls) == pytest.approx(6.0)


def test_operators_of_a_type_take_longer_in_a_step_and_their_calls_do_not():
    in_a_step = engine(operator_seconds=0.5, float32_in_step=2.0, bfloat16_in_step=3.0)
    assert operator_seconds(cost("pointwise", moved=10), in_a_step) == pytest.approx(2.5)
    narrow = cost("pointwise", moved=10, dtype="bfloat16")
    assert operator_seconds(narrow, in_a_step) == pytest.approx(3.5)
    assert operator_seconds(cost("pointwise", moved=10, dtype="any"), in_a_step) == 2.5


@pytest.mark.parametrize(
    ("micro_batches", "narrow", "seconds"),
    [
        (1, 0, 0.0),
        (4, 0, 3 * 3 * 100 / 10),  # each sum reads two and writes one
        (4, 100, 3 * 3 * 100 / 10 + 4 * 150 / 10),  # each is read, and written twice as wide
        (4, 40, 3 * 3 * 100 / 10 + 4 * 60 / 10),
        (1, 100, 0.0),
    ],
)
def test_the_gradients_of_micro_batches_are_converted_and_added(micro_batches, narrow, seconds):
    assert sum_seconds(100, narrow, micro_batches, engine()) == pytest.approx(seconds)


def test_update_reads_and_writes_master_and_moments_and_reads_the_gradient():
    [weight] = make_program([{"w": (10, 10)}]).weights.values()
    roles = AdamW(0.9, 0.95, 1e-8).roles
    assert update_bytes(weight, roles, 4) == 100 * (2 * (4 + 8) + 4)
    assert update_bytes(weight, roles, 2) == 100 * (2 * (4 + 8) + 2)


def test_host_whose_processor_is_the_engine_works_in_one_thread_unless_it_starts_processes():
    machine = MachineDescription.model_validate(
        {
            "name": "host",
            "kind": "host",
            "engine": {"is_host": True, "rates": [w("product"), w("pointwise")]},
            "store": {"memory": "24GiB", "rates": [w("update")]},
        }
    )
    assert Arrangement(machine).is_one_thread
    assert not Arrangement(machine, shares_cores=True).is_one_thread


def w(work):
    return {"work": work, "rates": [FAST]}
