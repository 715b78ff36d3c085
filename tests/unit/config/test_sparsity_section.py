"""What a mistake in the `sparsity` section is answered with, to the letter."""

import pytest
from pydantic import ValidationError

from penstock.config import Config, check_resumable, trajectory
from penstock.config.problems import Origin, explain
from penstock.config.section import Section, section
from penstock.config.sparsity import SparsityConfig
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
        (
            {"method": "set", "sparsity": 0.5, "densify_at": 0},
            "sparsity.densify_at: expected a step of 1 or more, got 0; a run without masks has no "
            "sparsity.method",
        ),
        (
            {"method": "set", "initial_mask": "zeros", "distribution": "erdos_renyi_kernel"},
            "sparsity.distribution: has no effect with initial_mask: zeros, which takes the zeros "
            "of the checkpoint; remove it, or choose another initial_mask",
        ),
        (
            {"method": "rigl", "sparsity": 0.5, "update_every": 1},
            "sparsity.update_every: expected at least 2 with rigl, whose changes take the place "
            "of the weights' update in their step, got 1",
        ),
        (
            {"method": "gmp", "sparsity": 0.5, "initial_mask": "zeros"},
            "sparsity.initial_mask: has no effect on gmp; remove it, or choose static or set or "
            "rigl",
        ),
    ],
)
def test_mistakes_are_answered_to_the_letter(keys, expected):
    with pytest.raises(ValidationError) as raised:
        parsed(**keys)
    assert explain(raised.value, Root, Origin()) == expected


def configured(**sections) -> Config:
    return Config.from_mapping({"model": "tiny", **sections})


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
        (
            {"method": "static", "densify_at": 0.0001},
            "sparsity.densify_at: expected a place after step 0 of the 1000 steps, got 0.0001; "
            "write the number of a step",
        ),
    ],
)
def test_steps_after_the_end_of_the_run_are_refused(keys, expected):
    with pytest.raises(ConfigError) as raised:
        configured(sparsity={"sparsity": 0.9, **keys}, run={"steps": 1000})
    assert str(raised.value) == expected
    configured(sparsity={"sparsity": 0.9, **keys}, run={"steps": 200_000})


@pytest.mark.parametrize("steps", [1, 10, 1000])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"method": "rigl", "sparsity": 0.9},
        {"method": "gmp", "sparsity": 0.9, "densify_at": 1.0},
    ],
)
def test_a_section_within_the_run_passes(keys, steps):
    assert configured(sparsity=keys, run={"steps": steps}).run.steps == steps


@pytest.mark.parametrize(
    "engine", [{"device": "cuda"}, {"devices": "all"}, {"devices": ["cpu", "cpu"]}]
)
def test_sparse_weights_train_on_any_device(engine):
    config = configured(
        sparsity={"method": "rigl", "sparsity": 0.9}, engine=engine, batch={"size": 2}
    )
    assert config.sparsity.method == "rigl"


def test_masks_of_zeros_need_weights_with_zeros():
    zeros = {"method": "static", "initial_mask": "zeros"}
    with pytest.raises(ConfigError) as raised:
        configured(sparsity=zeros)
    assert str(raised.value) == (
        "sparsity.initial_mask: expected weights with zeros for initial_mask: zeros, such as those "
        "of model.hf; this model starts with random weights: choose another initial_mask"
    )
    config = Config.from_mapping({"model": {"hf": "folder"}, "sparsity": zeros})
    assert config.sparsity.sparsity is None


def test_a_dense_run_records_no_key_of_sparsity():
    assert not any(key.startswith("sparsity") for key in trajectory(configured()))


def test_places_are_compared_as_steps():
    keys = {"method": "rigl", "sparsity": 0.9}
    recorded = trajectory(configured(sparsity=keys, run={"steps": 40}))
    as_steps = configured(sparsity={**keys, "update_end": 30}, run={"steps": 40})
    check_resumable(as_steps, recorded)
    longer = configured(sparsity=keys, run={"steps": 80})
    with pytest.raises(
        ConfigError, match=r"sparsity\.update_end: 30 in the run, 60 now \(as a step"
    ):
        check_resumable(longer, recorded)


def test_a_completed_run_names_the_overrides_that_continue_it():
    config = configured(
        sparsity={"method": "rigl", "sparsity": 0.9, "densify_at": 0.9},
        run={"steps": 40},
        optimizer={"schedule": {"name": "constant"}},
    )
    assert config.more_steps(40) == (
        "run.steps=80 sparsity.update_begin=0 sparsity.update_end=30 sparsity.densify_at=36"
    )
    overrides = config.more_steps(40).split()
    check_resumable(Config.from_mapping(config.to_mapping(), overrides), trajectory(config))


def test_another_sparsity_is_another_run():
    recorded = trajectory(configured(sparsity={"method": "rigl", "sparsity": 0.9}))
    for other in ({}, {"method": "rigl", "sparsity": 0.8}, {"method": "set", "sparsity": 0.9}):
        with pytest.raises(ConfigError, match="configuration differs in keys"):
            check_resumable(configured(sparsity=other), recorded)
