"""Sweeps and deadlines: what they parse, and what they refuse."""

from types import SimpleNamespace

import pytest

from penstock.config import Config
from penstock.errors import BudgetError, ConfigError
from penstock.prediction import Sweep, as_csv, fewest_engines, parse_deadline, run_sweep
from penstock.prediction.run_price import RunPrice

TINY = Config.from_mapping(
    {"model": {"preset": "tiny"}, "batch": {"size": 64}, "run": {"steps": 100}}
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("engines=1..192", "1 2 4 8 16 32 64 128 192"),
        ("engines=3..24", "3 6 12 24"),
        ("engines=5..5", "5"),
        ("batch.size=8..64+8", "8 16 24 32 40 48 56 64"),
        ("batch.size=8..20+8", "8 16"),
        ("store.dram=1GiB, 2GiB", "1GiB 2GiB"),
        ("precision=fp32", "fp32"),
    ],
)
def test_sweep_names_its_values(text, values):
    assert Sweep.parse(text).values == tuple(values.split())


def test_sweep_knows_whether_it_leaves_numbers_out():
    assert Sweep.parse("engines=1..192").omits_numbers
    for text in ("engines=1..2", "engines=5..5", "engines=1..192+1", "engines=1,2,4"):
        assert not Sweep.parse(text).omits_numbers


@pytest.mark.parametrize(
    "text", ["engines", "engines=", "=1..2", "engines=0..4", "engines=8..4", "engines=1..9+0"]
)
def test_text_that_is_no_sweep_is_refused(text):
    with pytest.raises(ConfigError, match=r"--sweep: expected KEY=VALUES .*, got '"):
        Sweep.parse(text)


def test_sweep_of_too_many_values_is_refused():
    with pytest.raises(ConfigError, match="expected at most 1000 values, got 5000"):
        Sweep.parse("engines=1..5000+1")


def figures(config, seconds):
    """A prediction, reduced to what a table of a sweep reads."""
    return SimpleNamespace(
        config=config,
        tokens_per_second=1 / seconds,
        step_seconds=seconds,
        run_seconds=seconds * config.run.steps,
        machine=SimpleNamespace(name="rack"),
        plan=SimpleNamespace(
            micro_batches=64, memory={"store": 10}, shares=SimpleNamespace(engine_peak=7)
        ),
        flash=None,
        price=RunPrice(dollars_per_hour=36.0, watts=None),
        binding=lambda sweep: "compute",
    )


def test_sweep_has_a_point_for_every_value_and_the_reason_where_there_is_none():
    def plan(config):
        if config.engines == 4:
            raise BudgetError("it does not fit")
        return figures(config, 8 / config.engines)

    sweep = Sweep.parse("engines=1..4")
    points = run_sweep(TINY, sweep, plan)
    assert [point.value for point in points] == ["1", "2", "4"]
    assert [None if p.prediction is None else p.prediction.step_seconds for p in points] == [
        8.0,
        4.0,
        None,
    ]
    lines = as_csv(sweep, points).splitlines()
    assert lines[0].startswith("engines,tokens_per_second,step_seconds,run_seconds")
    assert lines[1] == "1,0.125,8.0,800.0,7,10,0,0,8.0,,compute,"
    assert lines[3] == "4,,,,,,,,,,,it does not fit"


def test_sweep_of_an_unknown_key_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.memry=1: unknown key \(did you mean"):
        run_sweep(TINY, Sweep.parse("engine.memry=1,2"), lambda config: None)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3 days", 259200), ("1 day", 86400), ("1.5 hours", 5400), ("2weeks", 1209600)],
)
def test_deadline_is_a_duration(text, seconds):
    assert parse_deadline(text) == seconds


@pytest.mark.parametrize("text", ["", "3", "days", "0 days", "-1 day", "3 fortnights"])
def test_text_that_is_no_duration_is_refused(text):
    with pytest.raises(ConfigError, match="--target: expected a duration such as '3 days'"):
        parse_deadline(text)


@pytest.mark.parametrize("seconds", [1000, 800, 799, 100, 13, 12.5])
def test_fewest_engines_that_make_a_deadline(seconds):
    found = fewest_engines(TINY, 64, seconds, lambda c: figures(c, 8 / c.engines))
    assert found.run_seconds <= seconds
    assert found.config.engines == 1 or 800 / (found.config.engines - 1) > seconds


@pytest.mark.parametrize(
    ("most", "limits"),
    [
        (16, "16 engines, the most that rack allows"),
        (None, "64 engines, the most that a batch of 64 micro-batches allows"),
        (100, "64 engines, the most that a batch of 64 micro-batches allows"),
        (64, "64 engines, the most that rack and a batch of 64 micro-batches allow"),
    ],
)
def test_deadline_that_no_number_of_engines_makes_is_refused_with_the_limit(most, limits):
    with pytest.raises(ConfigError, match=rf"--target: {limits}, take .* for .*, expected 1\S* s;"):
        fewest_engines(TINY, most, 1, lambda c: figures(c, 8 / c.engines))


@pytest.mark.parametrize("least", [2, 5, 16, 63, 64])
@pytest.mark.parametrize("seconds", [1000, 100, 12.5])
def test_engines_that_a_step_does_not_fit_are_too_few(least, seconds):
    def plan(config):
        if config.engines < least:
            raise BudgetError("a step does not fit")
        return figures(config, 8 / config.engines)

    found = fewest_engines(TINY, None, seconds, plan)
    assert found.config.engines == max(least, -(-800 // seconds))


def test_deadline_of_a_run_that_no_number_of_engines_can_hold_is_refused_with_the_sum():
    def plan(config):
        raise BudgetError(f"a step does not fit {config.engines}")

    with pytest.raises(BudgetError, match="a step does not fit 64"):
        fewest_engines(TINY, None, 1000, plan)
