"""Updates before the commit are made where steps wait for flash and are not expected to clip."""

import itertools

import pytest

from penstock.store.flash.adaptive_guesses import AdaptiveGuesses, guesses_of
from penstock.store.flash.guesses import ENVIRONMENT_VARIABLE, Guess, NoClipping, NoGuesses
from penstock.store.interface import Decision

STAGES = 10


class Run:
    """Steps of one second, which wait for flash as long as `wait` says."""

    def __init__(self, limit=1.0, wait=0.5):
        self.wait, self.limit = wait, limit
        self.now = self.waited = 0.0
        self.guesses = AdaptiveGuesses(limit, lambda: self.waited, lambda: self.now)

    def step(self, norm, first=None):
        """Run a step whose gradients have equal norms, or the first of them that of `first`.

        Returns the number of stages that were updated before the commit.
        """
        guess, squares = self.guesses.of(0), 0.0
        offered = 0
        for stage in reversed(range(STAGES)):
            squares += (norm**2 if first is None else first**2) / STAGES
            offered += self.guesses.expects(stage, squares) and guess is not None
        self.now += 1.0
        self.waited += self.wait
        scale = 1.0 if self.limit is None else min(1.0, self.limit / norm)
        self.guesses.decided(Decision(1, norm, scale, 0.1), scale == 1.0 if offered else None)
        return offered


def test_steps_far_from_the_limit_are_speculated_whole():
    run = Run()
    assert [run.step(0.5) for _ in range(6)] == [0, 0, *[STAGES] * 4]


def test_nothing_is_speculated_without_waiting():
    run = Run(wait=0.001)
    assert [run.step(0.5) for _ in range(200)] == [0] * 200


def test_speculation_begins_with_the_waiting_and_ends_with_it():
    run = Run(wait=0.0)
    assert {run.step(0.5) for _ in range(5)} == {0}
    run.wait = 0.3
    assert [run.step(0.5) for _ in range(3)] == [0, STAGES, STAGES]
    run.wait = 0.0  # speculation hides it: seen when one step is not speculated
    made = [run.step(0.5) for _ in range(200)]
    assert made == [STAGES] * 62 + [0] + [STAGES] + [0] * 136


def test_runs_without_clipping_are_always_speculated():
    run = Run(limit=None)
    made = [run.step(10.0**n) for n in (0, 3, -3, 5, -5, 2)]
    assert made == [0, 0, *[STAGES] * 4]


def test_steps_that_always_clip_are_never_speculated():
    run = Run()
    assert {run.step(2.0) for _ in range(50)} == {0}


def test_a_gradient_that_grows_is_seen_in_its_first_stages():
    run = Run()
    for _ in range(4):
        run.step(0.5)
    assert run.step(1.5) == 0


def test_wrong_guesses_narrow_the_margin_and_right_ones_widen_it():
    """The first stages look as before, the norm is above the limit all the same."""
    run = Run()
    for _ in range(4):
        run.step(0.75)
    assert run.step(1.1, first=0.7) == STAGES
    assert run.step(0.75) == 0  # the prediction is that of the step before
    assert [run.step(0.75) for _ in range(3)] == [0] * 3
    near = list(itertools.takewhile(lambda made: made == 0, (run.step(0.5) for _ in range(20))))
    assert len(near) < 5
    for _ in range(20):
        run.step(0.5)
    run.step(0.75)
    assert run.step(0.75) == STAGES


def test_guesses_by_setting(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert isinstance(guesses_of("off", 1.0, float), NoGuesses)
    assert isinstance(guesses_of("on", 1.0, float), NoClipping)
    assert isinstance(guesses_of("auto", 1.0, float), AdaptiveGuesses)
    assert NoClipping().of(7) == Guess(1.0)


@pytest.mark.parametrize("squares", [float("nan"), float("inf"), 0.0])
def test_gradients_that_are_not_numbers_or_zero_are_not_expected_to_be_right(squares):
    run = Run()
    for _ in range(4):
        run.step(0.5)
    assert run.guesses.expects(9, squares) == (squares == 0.0)
