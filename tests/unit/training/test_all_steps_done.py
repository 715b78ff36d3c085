"""The notice of a run that has all its steps."""

import pytest

from penstock.config import Config
from penstock.training.startup_notices import all_steps_done


@pytest.mark.parametrize("on_flash", [False, True])
def test_only_a_store_on_flash_is_said_to_be_unverified(on_flash):
    store = {"flash": {"path": "on/flash"}} if on_flash else {}
    settings = {"model": "gpt2", "run": {"dir": "a run", "steps": 3}, "store": store}
    text = all_steps_done(Config.from_mapping(settings), 3)
    assert text.startswith("the run already has its 3 steps; nothing to do. To train further: ")
    unverified = ". No checksum on flash was compared now: `penstock inspect 'a run'` verifies them"
    assert (unverified in text) == on_flash


def test_a_run_with_more_steps_than_configured_is_told_how_many():
    config = Config.from_mapping({"model": "gpt2", "run": {"dir": "a run", "steps": 40}})
    assert all_steps_done(config, 60).startswith(
        "the run already has 60 steps, more than run.steps=40; nothing to do. To train further: "
        "run.steps=120"
    )
