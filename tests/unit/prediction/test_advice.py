"""The changes that a plan suggests, against plans with these changes."""

import re

import pytest
from rich.console import Console

from penstock.config import Config
from penstock.machines import MachineDescription
from penstock.prediction import Planner, page

DESK = MachineDescription.model_validate(
    {
        "name": "desk",
        "kind": "host",
        "engine": {
            "is_host": True,
            "rates": [{"work": "product", "rates": [1e11]}, {"work": "pointwise", "rates": [1e10]}],
        },
        "store": {"memory": "24GiB", "rates": [{"work": "update", "rates": [1e10]}]},
    }
)


@pytest.fixture(autouse=True)
def _kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def settings(size, micro, memory):
    return Config.from_mapping(
        {
            "model": "tiny",
            "batch": {"size": size, "micro": micro},
            "data": {"sequence_length": 32},
            "engine": {"memory": memory},
        }
    )


def test_run_that_computes_stages_again_is_advised_a_smaller_batch_and_another_micro_batch():
    notices = []
    planner = Planner(notices.append)
    before = planner.plan(settings(64, 4, "6MiB"), DESK)
    assert before.plan.plan.recompute
    noticed = list(notices)
    found = {item.text: item.gain for item in planner.advice(before)}
    assert notices == noticed
    smaller = "batch.size: 16 computes the forward of no stage again (this changes the training)"
    micro = "batch.micro: 8 (the result changes by rounding alone)"
    assert set(found) == {smaller, micro}
    for text, changed in ((smaller, (16, 4)), (micro, (64, 8))):
        after = planner.plan(settings(*changed, "6MiB"), DESK)
        assert found[text] == pytest.approx(after.tokens_per_second / before.tokens_per_second)
        assert found[text] >= 1.03


def test_larger_batch_is_advised_with_the_warning_that_it_changes_the_training():
    planner = Planner()
    texts = [item.text for item in planner.advice(planner.plan(settings(8, 4, "auto"), DESK))]
    assert any(re.search(r"batch\.size: \d+; this changes the training\)$", t) for t in texts)


@pytest.mark.parametrize(
    ("size", "memory", "tried"),
    [
        (32, "auto", "a larger batch.size, optimizer.moments: 8bit"),
        (
            16,
            "3MiB",
            "a larger batch.size, a smaller batch.size, batch.micro halved and doubled, "
            "optimizer.moments: 8bit",
        ),
    ],
)
def test_page_without_advice_names_the_changes_that_were_tried(size, memory, tried):
    planner = Planner()
    found = planner.plan(settings(size, 4, memory), DESK)
    advice = planner.advice(found)
    assert not advice
    console = Console(width=400)
    with console.capture() as capture:
        console.print(page(found, advice))
    assert f"Of the changes that fit, none makes it more than 3 % faster: {tried}." in capture.get()
