"""What a mistake in the `sparsity` section is answered with, to the letter."""

import pytest
from pydantic import ValidationError

from penstock.config.problems import Origin, explain
from penstock.config.section import Section, section
from penstock.config.sparsity import SparsityConfig, check_places
from penstock.errors import ConfigError


class Root(Section):
    """A configuration of this section alone."""

    sparsity: SparsityConfig = section(SparsityConfig, "masks")


def parsed(**keys) -> SparsityConfig:
    return Root.model_validate({"sparsity": keys}).sparsity


def test_the_shortest_sections():
    assert parsed().method is None
    config = parsed(method="rigl", sparsity=0.9)
    assert (config.drop_fraction, config.update_every, config.update_end) == (0.3, 100, 0.75)
    assert parsed(method="static", sparsity=0.0).sparsity == 0
    schedule = parsed(method="gmp", sparsity=0.9, schedule={"begin": 100, "end": 0.5}).schedule
    assert (schedule.begin, schedule.end) == (100, 0.5)
    assert isinstance(schedule.begin, int)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"method": "rigl", "sparsity": 1.0},
            "sparsity.sparsity: expected a number below 1, got 1.0; for example "
            "sparsity.sparsity: 0.9",
        ),
        (
            {"method": "rigl", "sparsity": -0.1},
            "sparsity.sparsity: expected a number from 0 up, got -0.1; for example "
            "sparsity.sparsity: 0.9",
        ),
        (
            {"method": "rigl"},
            "sparsity.sparsity: expected a share with sparsity.method, such as 0.9, got null",
        ),
        (
            {"sparsity": 0.9},
            "sparsity.sparsity: has no effect without a method; set sparsity.method, such as rigl",
        ),
        (
            {"method": "static", "sparsity": 0.9, "drop_fraction": 0.2},
            "sparsity.drop_fraction: has no effect on static; remove it, or choose set or rigl",
        ),
        (
            {"method": "rigl", "sparsity": 0.9, "schedule": {"end": 0.5}},
            "sparsity.schedule: has no effect on rigl; remove it, or choose gmp",
        ),
        (
            {"method": "gmp", "sparsity": 0.5, "schedule": {"initial": 0.6}},
            "sparsity.schedule.initial: expected at most the final sparsity, 0.5, got 0.6",
        ),
        (
            {"method": "gmp", "sparsity": 0.5, "schedule": {"end": 1.5}},
            "sparsity.schedule.end: expected a share of the run from 0.0 to 1.0, or a whole "
            "number of steps, got 1.5",
        ),
        (
            {"method": "gmp", "sparsity": 0.5, "schedule": {"begin": 10, "end": 5}},
            "sparsity.schedule.end: expected an end that is not before the begin, 10, got 5",
        ),
        (
            {"method": "gmp", "sparsity": 0.5, "schedule": {"name": "linear", "power": 2.0}},
            "sparsity.schedule.power: has no effect on the schedule linear; remove it, or choose "
            "the name power",
        ),
        (
            {"method": "set", "sparsity": 0.5, "drop_power": 2.0},
            "sparsity.drop_power: has no effect on the decay cosine; remove it, or choose "
            "inverse_power",
        ),
        (
            {"method": "set", "sparsity": 0.5, "update_begin": 10, "update_end": 5},
            "sparsity.update_end: expected an end not before 10, got 5",
        ),
        (
            {"method": "set", "sparsity": 0.5, "densify_at": 1.2},
            "sparsity.densify_at: expected a share of the run from 0.0 to 1.0, or a whole number "
            "of steps, got 1.2",
        ),
    ],
)
def test_mistakes_are_answered_to_the_letter(keys, expected):
    with pytest.raises(ValidationError) as raised:
        parsed(**keys)
    assert explain(raised.value, Root, Origin()) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"method": "gmp", "schedule": {"begin": 0, "end": 1200}},
            "sparsity.schedule.end: step 1200 is after the end of the run, step 1000; lower it, "
            "or raise run.steps",
        ),
        (
            {"method": "gmp", "schedule": {"begin": 800}},
            "sparsity.schedule.end: expected an end that is not before the begin, step 800, got "
            "step 750; raise it, or begin earlier",
        ),
        (
            {"method": "rigl", "update_end": 1001},
            "sparsity.update_end: step 1001 is after the end of the run, step 1000; lower it, or "
            "raise run.steps",
        ),
        (
            {"method": "static", "densify_at": 1001},
            "sparsity.densify_at: step 1001 is after the end of the run, step 1000; lower it, or "
            "raise run.steps",
        ),
    ],
)
def test_steps_after_the_end_of_the_run_are_refused(keys, expected):
    config = parsed(sparsity=0.9, **keys)
    with pytest.raises(ConfigError) as raised:
        check_places(config, 1000)
    assert str(raised.value) == expected
    check_places(config, 2000)


def test_a_section_within_the_run_passes():
    check_places(parsed(), 10)
    check_places(parsed(method="rigl", sparsity=0.9), 10)
    check_places(parsed(method="gmp", sparsity=0.9, densify_at=1.0), 10)
