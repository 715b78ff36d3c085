"""The best held-out loss of a run is known after a resume, with its step."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock import Trainer
from penstock.errors import StorageError
from penstock.progress import LiveView
from penstock.store import find_checkpoint, read_state
from penstock.telemetry import Evaluated, RunStarted, broadcast

ROOT = Path(__file__).parents[2]
STORES = {"memory": {}, "flash": {"dram": "16MiB", "flash": {"path": "flash"}}}


def config(folder, steps, store):
    return {
        "model": {"preset": "tiny", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16},
        "data": {"input": [str(ROOT / "LICENSE")], "validation": 0.2},
        "batch": {"size": 4},
        "optimizer": {"schedule": {"name": "constant"}},
        "run": {"dir": folder, "steps": steps},
        "evaluation": {"every": 2, "batches": 1},
        "store": store,
    }


def is_evaluation(event):
    return isinstance(event, Evaluated)


def panel_text(view):
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(view.render())
    return console.export_text()


@pytest.mark.parametrize("store", STORES)
def test_resumed_run_starts_with_recorded_best_loss(tmp_path, monkeypatch, store):
    monkeypatch.chdir(tmp_path)

    def trained(steps, *losses):
        view, events = LiveView(Console(file=io.StringIO())), []
        settings = config("run", steps, STORES[store])
        trainer = Trainer(settings, on_event=broadcast([view, events.append]), quiet=True)
        left = iter(losses)
        trainer._evaluator.evaluate = lambda batches, should_stop, on_batch: {
            "loss": next(left),
            "perplexity": 1.0,
            "tokens": 1,
        }
        trainer.train()
        trainer.close()
        (start,) = (event for event in events if isinstance(event, RunStarted))
        return (start.best_loss, start.best_step), panel_text(view)

    first, shown = trained(5, 3.0, 3.25, 3.75)
    assert first == (None, None)
    assert "│ best      3.0000 at step 2  " in shown
    trained(5)  # a complete run is not evaluated again
    second, shown = trained(7, 3.25, 3.5)
    assert second == (3.0, 2)
    assert "│ held out  3.5000  " in shown
    assert "│ best      3.0000 at step 2  " in shown
    third, shown = trained(8, 2.5)
    assert third == (3.0, 2)
    assert "│ best      2.5000 at step 8  " in shown


class Killed(BaseException):
    """Stands for the end of the process."""


FLASH = {
    **STORES,
    "sealed less often": {"dram": "16MiB", "flash": {"path": "flash", "durable_every": 3}},
    "flash in shards": {"dram": "16MiB", "shards": 2, "flash": {"path": "flash"}},
}


@pytest.mark.parametrize("error", [Killed, StorageError])
@pytest.mark.parametrize("store", FLASH)
def test_best_checkpoint_that_was_not_written_is_written_after_a_resume(
    tmp_path, monkeypatch, store, error
):
    def trainer_in(folder, events):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        return Trainer(config("run", 6, FLASH[store]), quiet=True, on_event=events.append)

    def evaluated(events):
        return [(event.step, event.loss, event.best) for event in events if is_evaluation(event)]

    def fail(*_, **options):
        if options["best"]:
            raise error

    whole: list = []
    plain = trainer_in(tmp_path / "plain", whole)
    plain.train()
    assert evaluated(whole)[1][::2] == (4, True)

    before: list = []
    first = trainer_in(tmp_path / "killed", before)
    with monkeypatch.context() as patch:
        first.run_step()
        for place in ("checkpoint_backends.save_checkpoint", "checkpoint_backends.BackgroundSave"):
            patch.setattr(f"penstock.training.{place}", fail)
        with pytest.raises(error):
            first.train()
    first.close()
    after: list = []
    second = trainer_in(tmp_path / "killed", after)
    second.train()
    assert evaluated(after) == evaluated(whole)
    best = [
        read_state(find_checkpoint(tmp_path / one / "run" / "checkpoints", "best"))
        for one in ("plain", "killed")
    ]
    assert best[0].step == best[1].step
    assert best[0].extra["best_loss"] == best[1].extra["best_loss"]
    assert (second._extra()) == plain._extra()
    for trainer in (plain, second):
        trainer.close()
