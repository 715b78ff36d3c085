"""The best loss of a run: finite, and compared only with losses on the same rows."""

from __future__ import annotations

import dataclasses
import math

import pytest

from penstock.config import Config
from penstock.training.early_stop import EarlyStop, evaluation_due
from penstock.training.resume_state import ResumeState

CONFIG = Config.from_mapping(
    {"model": {"preset": "gpt2"}, "evaluation": {"batches": 8, "early_stop_patience": 3}}
)


def recorded(**changes) -> ResumeState:
    values = {"best_loss": 2.5, "best_step": 400, "evaluations_since_best": 2, **changes}
    return ResumeState({}, 1, None, None, None, **values)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_is_never_the_best(loss):
    early_stop = EarlyStop(patience=2)
    assert not early_stop.judge(1, loss)
    assert (early_stop.best_loss, early_stop.best_step) == (None, None)
    assert early_stop.judge(2, 3.0)
    assert not early_stop.judge(3, loss)
    assert early_stop.best_loss == 3.0
    assert not early_stop.is_due
    assert not early_stop.judge(4, loss)
    assert early_stop.is_due


def test_recorded_loss_that_is_not_finite_is_forgotten():
    assert EarlyStop.of_run(CONFIG, recorded(best_loss=math.nan), 400).judge(401, 9.0)


@pytest.mark.parametrize("batches", [8, None])  # None: recorded by an older release
def test_best_loss_continues_on_the_same_batches(batches):
    early_stop = EarlyStop.of_run(CONFIG, recorded(best_batches=batches), 400)
    assert early_stop.forgotten is None
    assert (early_stop.best_loss, early_stop.best_step) == (2.5, 400)
    assert not early_stop.judge(401, 2.6)
    assert early_stop.is_due


def test_best_loss_on_another_number_of_batches_is_forgotten():
    early_stop = EarlyStop.of_run(CONFIG, recorded(best_batches=16), 400)
    assert early_stop.forgotten == (
        "evaluation.batches: the best held-out loss so far, 2.5 at step 400, was measured on 16 "
        "batches, and this run evaluates on 8; losses on different rows are not compared, so the "
        "next evaluation starts with a new best loss"
    )
    assert early_stop.judge(401, 2.6)
    assert early_stop.evaluations_since_best == 0


def test_evaluations_without_a_finite_loss_count_after_a_resume():
    early_stop = EarlyStop.of_run(CONFIG, recorded(best_loss=None, best_step=None), 400)
    assert not early_stop.judge(401, math.nan)
    assert early_stop.is_due


def test_repeated_step_changes_nothing():
    early_stop = EarlyStop(patience=2)
    assert [early_stop.judge(step, loss) for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5))] == [
        True,
        True,
        False,
    ]
    known = dataclasses.replace(early_stop)
    assert [early_stop.judge(step, loss) for step, loss in ((2, 2.0), (3, 2.5))] == [True, False]
    assert early_stop == known
    assert not early_stop.judge(4, 2.1)
    assert early_stop.is_due


@pytest.mark.parametrize(("evaluated", "expected"), [(300, 300), (0, 0), (None, 400)])
def test_newest_judged_step_is_the_recorded_one(evaluated, expected):
    # None: recorded by an older release, whose runs were evaluated before they were saved.
    found = EarlyStop.of_run(CONFIG, recorded(evaluated_step=evaluated), 400)
    assert found.judged_step == expected


def test_evaluation_after_the_last_step_may_be_the_best_but_costs_no_patience():
    """Else a run that is continued would stop before an uninterrupted one."""
    early_stop = EarlyStop(patience=2)
    assert early_stop.judge(2, 3.0)
    assert not early_stop.judge(4, 3.5)
    assert not early_stop.judge(5, 3.5, is_counted=False)
    assert (early_stop.evaluations_since_best, early_stop.is_due) == (1, False)
    assert early_stop.judge(7, 2.5, is_counted=False)
    assert (early_stop.best_step, early_stop.evaluations_since_best) == (7, 0)


@pytest.mark.parametrize(
    ("step", "due"), [(0, None), (2, "scheduled"), (3, None), (4, "scheduled"), (5, "last")]
)
def test_run_is_evaluated_at_its_interval_and_after_its_last_step(step, due):
    config = Config.from_mapping({"run": {"steps": 5}, "evaluation": {"every": 2}})
    assert evaluation_due(config, step) == due
    never = Config.from_mapping({"run": {"steps": 5}, "evaluation": {"every": None}})
    assert evaluation_due(never, step) is None
