"""What a run leaves in its folder, whoever started it."""

from pathlib import Path

import pytest

from penstock import Trainer
from penstock.errors import StorageError
from penstock.metrics import read_metrics

ROOT = Path(__file__).parents[2]


def config(folder: Path, steps: int) -> dict:
    return {
        "model": "tiny",
        "data": {"input": [str(ROOT / "LICENSE")], "validation": 0.2, "sequence_length": 64},
        "batch": {"size": 4},
        "optimizer": {"schedule": {"name": "constant"}},
        "run": {"dir": str(folder), "steps": steps},
        "evaluation": {"every": 3, "batches": 1},
        "checkpoint": {"every": 2},
    }


def test_every_step_stands_once_in_the_metrics_of_a_run_that_was_resumed(tmp_path):
    Trainer(config(tmp_path / "run", 4)).train()
    Trainer(config(tmp_path / "run", 7)).train()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "learning_rate" in row] == [1, 2, 3, 4, 5, 6, 7]
    assert (tmp_path / "run" / "config.yaml").exists()


def test_a_finished_run_says_so_and_stays_as_it_is(tmp_path):
    Trainer(config(tmp_path / "run", 3)).train()
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    said: list[str] = []
    trainer = Trainer(
        config(tmp_path / "run", 3), on_event=lambda event: said.append(getattr(event, "text", ""))
    )
    assert trainer.train()["steps"] == 0
    assert "the run already has its 3 steps; nothing to do" in said
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_run_that_was_interrupted_in_a_step_can_go_on(tmp_path):
    trainer = Trainer(config(tmp_path / "a", 4))
    receive, calls = trainer.store.receive, []

    def interrupted(*arguments):
        receive(*arguments)
        calls.append(arguments)
        if len(calls) == 8:
            raise KeyboardInterrupt

    trainer.store.receive = interrupted
    try:
        trainer.train()
    except KeyboardInterrupt:
        trainer.store.receive = receive
    assert 0 < trainer.step < 4
    trainer.train()
    plain = Trainer(config(tmp_path / "b", 4))
    plain.train()
    assert trainer.store.content_hash() == plain.store.content_hash()


def test_an_update_that_was_interrupted_is_never_made_twice(tmp_path, monkeypatch):
    """Half of it may be in the weights: they are used no more, and the run goes on from disk."""
    settings = {**config(tmp_path / "a", 4), "checkpoint": {"every": 2}}
    trainer = Trainer(settings)
    apply, calls = trainer.store._apply, []

    def interrupted(name):
        apply(name)
        calls.append(name)
        if trainer.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer.store, "_apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    monkeypatch.undo()
    for use in (trainer.train, trainer.save, trainer.store.content_hash):
        with pytest.raises(StorageError) as caught:
            use()
        assert str(caught.value) == (
            f"the update of {calls[-1]} was interrupted half-way, so the weights are those of no "
            "step; open the run again, it goes on from its last checkpoint"
        )
    again = Trainer(settings)
    assert again.step == 2
    again.train()
    plain = Trainer(config(tmp_path / "b", 4))
    plain.train()
    assert again.store.content_hash() == plain.store.content_hash()
