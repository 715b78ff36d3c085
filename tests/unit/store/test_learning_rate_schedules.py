"""Schedules against those of PyTorch and transformers."""

from itertools import pairwise

import pytest
import torch
import transformers

from penstock.errors import ConfigError
from penstock.store.learning_rate_schedules import Schedule, learning_rate

PEAK = 3e-3
STEPS = 100


def ours(**settings) -> list[float]:
    schedule = Schedule(peak=PEAK, **settings)
    return [learning_rate(schedule, step) for step in range(STEPS + 20)]


def theirs(make) -> list[float]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=PEAK)
    scheduler = make(optimizer)
    rates = []
    for _ in range(STEPS + 20):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 13])
@pytest.mark.parametrize(
    ("settings", "make"),
    [
        (
            {"name": "constant"},
            lambda o, w: transformers.get_constant_schedule_with_warmup(o, w),
        ),
        (
            {"name": "linear", "decay_steps": STEPS},
            lambda o, w: transformers.get_linear_schedule_with_warmup(o, w, STEPS),
        ),
        (
            {"name": "polynomial", "decay_steps": STEPS, "power": 2.5, "final_ratio": 0.1},
            lambda o, w: transformers.get_polynomial_decay_schedule_with_warmup(
                o, w, STEPS, lr_end=0.1 * PEAK, power=2.5
            ),
        ),
        (
            {"name": "cosine", "decay_steps": STEPS, "final_ratio": 0.1},
            lambda o, w: transformers.get_cosine_with_min_lr_schedule_with_warmup(
                o, w, STEPS, min_lr_rate=0.1
            ),
        ),
    ],
)
def test_schedules_equal_transformers(settings, make, warmup):
    expected = theirs(lambda optimizer: make(optimizer, warmup))
    got = ours(warmup_steps=warmup, **settings)
    # Behind the end theirs turn up again or stop; ours stay.
    assert got[: STEPS + 1] == pytest.approx(expected[: STEPS + 1], rel=1e-12, abs=1e-18)


def test_inverse_square_root_equals_transformers_after_warm_up():
    expected = theirs(lambda o: transformers.get_inverse_sqrt_schedule(o, num_warmup_steps=13))
    assert ours(name="inverse_square_root", warmup_steps=13) == pytest.approx(expected, rel=1e-12)


def test_piecewise_equals_pytorchs_multi_step():
    expected = theirs(lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [30, 80], gamma=0.1))
    got = ours(name="piecewise", boundaries=(30, 80), ratios=(0.1, 0.01))
    assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial"])
@pytest.mark.parametrize("final", [0.0, 0.25, 1.0])
def test_the_final_ratio_is_reached_and_kept(name, final):
    rates = ours(name=name, decay_steps=STEPS, warmup_steps=10, final_ratio=final)
    assert rates[10] == PEAK
    assert rates[STEPS:] == pytest.approx([final * PEAK] * 20, abs=1e-18)
    assert all(later <= earlier for earlier, later in pairwise(rates[10:]))


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "constant"},
        {"name": "inverse_square_root"},
        {"name": "piecewise", "boundaries": (50,), "ratios": (0.1,)},
        {"name": "cosine", "decay_steps": STEPS},
    ],
)
def test_a_warm_up_goes_with_any_schedule(settings):
    rates = ours(warmup_steps=20, **settings)
    assert rates[:21] == pytest.approx([PEAK * step / 20 for step in range(21)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "cosin"},
            "schedule 'cosin' is not known (did you mean 'cosine'?); choose one of constant, "
            "linear, cosine, polynomial, inverse_square_root, piecewise",
        ),
        (
            {"name": "linear", "decay_steps": 10, "warmup_steps": 10},
            "schedule 'linear' needs more steps than its warm-up: 10 steps, 10 of them warm-up; "
            "lower the warm-up or train longer",
        ),
        (
            {"name": "piecewise", "boundaries": (5, 5), "ratios": (0.1, 0.1)},
            "piecewise schedule: expected rising boundaries, got [5, 5]",
        ),
        (
            {"name": "piecewise", "boundaries": (5,)},
            "piecewise schedule: expected one ratio per boundary, got 1 boundaries and 0 ratios",
        ),
        (
            {"name": "linear", "decay_steps": 10, "final_ratio": 1.5},
            "final_ratio: expected a share from 0 to 1, got 1.5",
        ),
    ],
)
def test_invalid_schedules_are_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        Schedule(peak=PEAK, **settings)
    assert str(caught.value) == message


def test_steps_count_from_zero():
    with pytest.raises(ValueError, match="steps count from 0, got -1"):
        learning_rate(Schedule("constant", PEAK), -1)
