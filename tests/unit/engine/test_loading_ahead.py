"""How far ahead weights are loaded follows from the engine, and changes no bit."""

import pytest
from plain_training import Recipe, trainer_of
from tiny_models import language_model

from penstock.engine import TorchEngine
from penstock.engine.slots import InPlace
from penstock.step.fetching import Fetches

RECIPE = Recipe(steps=3, warmup_steps=0, size=4, micro=2)


@pytest.fixture(scope="module")
def losses_in_place(tmp_path_factory):
    trainer, events = trainer_of(language_model("gpt2"), RECIPE, tmp_path_factory.mktemp("run"))
    trainer.train()
    return [event.loss for event in events], trainer.store.content_hash()


def noting(name, method, calls):
    def call(engine, stage, *arguments):
        if type(engine) is TorchEngine:  # not the one of a dry run
            calls.append((name, stage))
        return method(engine, stage, *arguments)

    return call


@pytest.mark.parametrize("is_ready", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_stages_are_loaded_stages_ahead_of_use(
    ahead, is_ready, losses_in_place, tmp_path, monkeypatch
):
    """In the forward sweep, if their weights are there."""
    monkeypatch.setattr(InPlace, "ahead", ahead)
    monkeypatch.setattr(Fetches, "is_ready", lambda fetches: is_ready)
    calls = []
    for name in ("load", "forward", "turn", "backward"):
        monkeypatch.setattr(TorchEngine, name, noting(name, getattr(TorchEngine, name), calls))
    trainer, events = trainer_of(language_model("gpt2"), RECIPE, tmp_path)
    trainer.train()
    assert ([event.loss for event in events], trainer.store.content_hash()) == losses_in_place

    stages = len(trainer.program.stages)
    assert stages > 3
    step = calls[: len(calls) // RECIPE.steps]
    order = [*range(stages), *reversed(range(stages - 1))]
    computed = [place for place, (name, _) in enumerate(step) if name != "load"]
    assert [step[place][1] for place in computed] == order
    for number, place in enumerate(computed):
        before = [stage for name, stage in step[:place] if name == "load"]
        loaded = number + 1 + ahead
        if not is_ready and number < stages - 1:  # the turn is the last forward
            loaded = number + 1
        assert before == order[:loaded]


@pytest.mark.parametrize("shards", [1, 2])
def test_flash_store_has_the_same_bits_if_weights_are_fetched_ahead(
    shards, losses_in_place, tmp_path, monkeypatch
):
    """Of both kinds of store on flash: their buffers are valid for few fetches."""
    monkeypatch.setattr(InPlace, "ahead", 1)
    store = {"flash": {"path": str(tmp_path / "flash")}, "shards": shards}
    trainer, events = trainer_of(language_model("gpt2"), RECIPE, tmp_path / "run", store=store)
    trainer.train()
    assert [event.loss for event in events] == losses_in_place[0]
    assert trainer.store.content_hash() == losses_in_place[1]
