"""What a run leaves in its folder, whoever started it."""

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from penstock import Trainer
from penstock.errors import ConfigError, NonFiniteError, StorageError
from penstock.store import find_checkpoint
from penstock.telemetry.events import StepDone
from penstock.telemetry.metrics_writer import read_metrics

ROOT = Path(__file__).parents[2]


def config(folder: Path, steps: int) -> dict:
    return {
        "model": {"preset": "tiny", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16},
        "data": {"input": [str(ROOT / "LICENSE")], "validation": 0.2},
        "batch": {"size": 4},
        "optimizer": {"schedule": {"name": "constant"}},
        "run": {"dir": str(folder), "steps": steps},
        "evaluation": {"every": 3, "batches": 1},
        "checkpoint": {"every": 2},
    }


@pytest.mark.long
def test_metrics_of_a_resumed_run_have_each_step_once(tmp_path):
    Trainer(config(tmp_path / "run", 4)).train()
    metrics = tmp_path / "run" / "metrics.jsonl"
    last = next(row for row in reversed(read_metrics(metrics)) if "learning_rate" in row)
    with metrics.open("a") as file:  # as of a run that was killed after its last checkpoint
        file.writelines(json.dumps(last | {"step": step, "loss": 99.0}) + "\n" for step in (5, 6))
    Trainer(config(tmp_path / "run", 7)).train()
    rows = [row for row in read_metrics(metrics) if "learning_rate" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert all(row["loss"] < 99.0 for row in rows)
    assert (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.long
def test_finished_run_reports_completion_and_is_unchanged(tmp_path):
    Trainer(config(tmp_path / "run", 3)).train()
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    said: list[str] = []
    trainer = Trainer(
        config(tmp_path / "run", 3), on_event=lambda event: said.append(getattr(event, "text", ""))
    )
    assert trainer.train()["steps"] == 0
    assert "the run already has its 3 steps; nothing to do. To train further: run.steps=6" in said
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_run_interrupted_in_a_step_can_continue(tmp_path):
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
    rows = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert [row["step"] for row in rows if "learning_rate" in row] == [1, 2, 3, 4]


def test_interrupted_update_is_not_applied_twice(tmp_path, monkeypatch):
    """Half of it may be in the weights: they are used no more, and the run goes on from disk."""
    settings = config(tmp_path / "a", 4)
    trainer = Trainer(settings)
    trainer.run_step()
    trainer.run_step()
    trainer.save()
    updates, calls = trainer.store._updates, []
    apply = updates._apply

    def interrupted(name):
        apply(name)
        calls.append(name)
        if trainer.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(updates, "_apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    monkeypatch.undo()
    for use in (trainer.train, trainer.save, trainer.store.content_hash):
        with pytest.raises(StorageError) as caught:
            use()
        assert str(caught.value) == (
            f"the update of {calls[-1]} was interrupted, so the weights are not those of a "
            "complete step; open the run again: it continues from its last checkpoint"
        )
        assert "penstock saver" not in [thread.name for thread in threading.enumerate()]
    again = Trainer(settings)
    assert again.step == 2
    again.train()
    plain = Trainer(config(tmp_path / "b", 4))
    plain.train()
    assert again.store.content_hash() == plain.store.content_hash()


def test_run_has_one_trainer_at_a_time(tmp_path):
    first, second = (Trainer(config(tmp_path / "run", 4)) for _ in range(2))
    refused: list[str] = []

    def try_the_other(event):
        if isinstance(event, StepDone) and not refused:
            with pytest.raises(StorageError) as caught:
                second.train()
            refused.append(str(caught.value))

    first._listener = try_the_other
    first.train()
    assert refused == [
        f"{tmp_path / 'run'} is in use by process {os.getpid()}; wait until it ends, or stop it"
    ]
    with pytest.raises(ConfigError) as caught:
        second.train()  # it would do steps again that are done
    assert str(caught.value) == (
        f"{tmp_path / 'run'} has been trained to step 4 by another trainer, this trainer is at "
        "step 0; create a new Trainer, which continues from step 4"
    )
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")][-1] == 4


def test_the_best_checkpoint_outlives_its_index(tmp_path):
    trainer = Trainer({**config(tmp_path / "run", 8), "checkpoint": {"every": 1, "keep_last": 1}})
    losses = iter([1.0, 2.0, 3.0])
    trainer._evaluator.evaluate = lambda batches, should_stop, on_batch: {
        "loss": next(losses),
        "perplexity": 1.0,
        "tokens": 1,
    }
    trainer.train()
    checkpoints = tmp_path / "run" / "checkpoints"
    best = find_checkpoint(checkpoints, "best")
    assert best.name == "step-00000003"
    (checkpoints / "index.json").unlink()  # as the error of a damaged one advises
    assert find_checkpoint(checkpoints, "best") == best
    Trainer({**config(tmp_path / "run", 9), "checkpoint": {"keep_last": 1}}).save()
    assert best.exists()


def test_non_finite_updated_weights_are_not_saved(tmp_path):
    settings = {**config(tmp_path / "run", 3), "checkpoint": {"every": 1}}
    trainer = Trainer(settings)
    trainer.train()
    trainer.store.begin_restore()
    trainer.store.write("transformer.wpe.weight", "master", 5, np.float32([np.nan]))
    trainer.store.finish_restore(4)
    with pytest.raises(NonFiniteError) as caught:
        trainer.save()
    assert str(caught.value) == (
        "step 4 is not saved: the update made transformer.wpe.weight NaN or infinite; earlier "
        "checkpoints are unchanged. Start a run with a lower optimizer.learning_rate in another "
        "run.dir"
    )
    assert Trainer(settings).step == 3


def test_damaged_metrics_do_not_stop_a_run(tmp_path):
    Trainer(config(tmp_path / "run", 2)).train()
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_bytes(b"\xff\xfe" + metrics.read_bytes() + b"[" * 100_000 + b"\n")
    Trainer(config(tmp_path / "run", 3)).train()
    assert read_metrics(metrics)[-1]["step"] == 3


@pytest.mark.parametrize(("size", "noticed"), [(257, False), (288, False), (512, True)])
def test_vocabulary_larger_than_the_tokenizers_gives_a_notice(size, noticed, tmp_path):
    said: list[str] = []
    settings = {**config(tmp_path / "run", 1), "model": {"preset": "tiny", "vocab_size": size}}
    Trainer(settings, on_event=lambda event: said.append(getattr(event, "text", "")))
    assert (
        "the model has a vocabulary of 512, the data set's tokenizer, bytes, has 257 ids: 255 rows "
        "of the embedding are never used; set the model's vocab_size to 257, or a little more"
        in said
    ) is noticed
