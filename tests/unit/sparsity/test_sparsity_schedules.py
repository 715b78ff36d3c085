"""Schedules against the papers' equations, and what is refused."""

import itertools
import math

import pytest

from penstock.errors import ConfigError
from penstock.sparsity import (
    ChangeTimes,
    DropFraction,
    SparsitySchedule,
    drop_fraction_at,
    sparsity_at,
    steps_of,
)

NAMES = ["constant", "linear", "cosine", "exponential", "power"]


def test_the_cubic_schedule_is_equation_1_of_zhu_and_gupta():
    # s_t = s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3, here with t_0 = 200, n dt = 800.
    schedule = SparsitySchedule("power", 0.9, 0.1, 200, 1000)
    for step in range(200, 1001, 40):
        expected = 0.9 + (0.1 - 0.9) * (1 - (step - 200) / 800) ** 3
        assert sparsity_at(schedule, step) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("name", "half_way"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", 1 - math.sqrt(0.8 * 0.2)),
        ("power", 0.8 - 0.6 / 8),
    ],
)
def test_half_way(name, half_way):
    assert sparsity_at(SparsitySchedule(name, 0.8, 0.2, 100, 300), 200) == pytest.approx(half_way)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("initial", [0.0, 0.5, 0.9])
def test_a_schedule_rises_from_begin_to_end_and_reaches_its_end_exactly(name, initial):
    schedule = SparsitySchedule(name, 0.9, initial, 10, 110)
    course = [sparsity_at(schedule, step) for step in range(200)]
    assert course[110:] == [0.9] * 90
    assert course[:11] == [0.9 if name == "constant" else initial] * 11
    assert all(later >= earlier - 1e-15 for earlier, later in itertools.pairwise(course))


@pytest.mark.parametrize(
    ("place", "step"), [(0, 0), (250, 250), (0.25, 250), (1.0, 1000), (1, 1), (0.0, 0)]
)
def test_a_place_is_a_step_or_a_share_of_the_run(place, step):
    assert steps_of(place, 1000) == step


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (1001, "sparsity: step 1001 is outside the run of 1000 steps; lower it, or train longer"),
        (-1, "sparsity: step -1 is outside the run of 1000 steps; lower it, or train longer"),
        (
            1.5,
            "sparsity: expected a share of the run from 0 to 1, or a whole number of steps, got "
            "1.5",
        ),
    ],
)
def test_a_place_outside_the_run_is_refused(place, message):
    with pytest.raises(ConfigError) as caught:
        steps_of(place, 1000)
    assert str(caught.value) == message


def test_masks_change_at_the_begin_and_then_every_so_many_steps():
    times = ChangeTimes(10, 50, 15)
    assert [step for step in range(100) if times.is_due(step)] == [10, 25, 40]


def test_the_cosine_of_the_drop_fraction_is_equation_1_of_rigl():
    fraction = DropFraction(0.3, 750)
    for step in range(0, 750, 50):
        expected = 0.3 / 2 * (1 + math.cos(step * math.pi / 750))
        assert drop_fraction_at(fraction, step) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("name", "power", "at_100"),
    [
        ("constant", 3.0, 0.3),
        ("linear", 3.0, 0.15),
        ("inverse_power", 3.0, 0.3 / 8),
        ("inverse_power", 1.0, 0.15),
    ],
)
def test_other_decays_and_the_end(name, power, at_100):
    fraction = DropFraction(0.3, 200, name, power)
    assert drop_fraction_at(fraction, 0) == 0.3
    assert drop_fraction_at(fraction, 100) == pytest.approx(at_100)
    assert drop_fraction_at(fraction, 200) == drop_fraction_at(fraction, 10_000) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SparsitySchedule("linear", 1.0),
            "sparsity: expected a share of absent entries from 0 to below 1, such as 0.9, got 1.0",
        ),
        (
            lambda: SparsitySchedule("linear", math.nan),
            "sparsity: expected a share of absent entries from 0 to below 1, such as 0.9, got nan",
        ),
        (
            lambda: SparsitySchedule("linear", 0.9, -0.1),
            "initial sparsity: expected a share of absent entries from 0 to below 1, such as 0.9, "
            "got -0.1",
        ),
        (
            lambda: SparsitySchedule("cosin", 0.9),
            "sparsity schedule 'cosin' is not known (did you mean 'cosine'?); choose one of "
            "constant, linear, cosine, exponential, power",
        ),
        (
            lambda: SparsitySchedule("linear", 0.9, 0.0, 10, 5),
            "sparsity: expected the schedule to begin at step 0 or later and not after its end, "
            "got steps 10 to 5",
        ),
        (
            lambda: SparsitySchedule("power", 0.9, power=0.0),
            "sparsity schedule: expected a power above 0, got 0.0",
        ),
        (
            lambda: ChangeTimes(0, 10, 0),
            "sparsity: expected a mask change every 1 step or more, got 0",
        ),
        (
            lambda: DropFraction(1.0, 10),
            "drop fraction: expected a share between 0 and 1, such as 0.3, got 1.0",
        ),
        (
            lambda: DropFraction(0.3, 0),
            "drop fraction: expected to end at step 1 or later, got 0",
        ),
        (
            lambda: DropFraction(0.3, 10, "cosin"),
            "decay of the drop fraction 'cosin' is not known (did you mean 'cosine'?); choose one "
            "of constant, cosine, linear, inverse_power",
        ),
    ],
)
def test_values_out_of_their_range_are_refused(make, message):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == message


def test_steps_count_from_0():
    with pytest.raises(ValueError, match="a step of 0 or more, got -1"):
        sparsity_at(SparsitySchedule("linear", 0.9, 0.0, 0, 5), -1)
    with pytest.raises(ValueError, match="a step of 0 or more, got -1"):
        drop_fraction_at(DropFraction(0.3, 10), -1)
