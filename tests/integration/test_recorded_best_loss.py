"""The best held-out loss of a run is known after a resume, with its step."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock import Trainer
from penstock.progress import LiveView
from penstock.telemetry import RunStarted, broadcast

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
        trainer.evaluate = lambda: {"loss": next(left), "perplexity": 1.0, "tokens": 1}
        trainer.train()
        trainer.close()
        (start,) = (event for event in events if isinstance(event, RunStarted))
        return (start.best_loss, start.best_step), panel_text(view)

    first, shown = trained(5, 3.0, 3.25)
    assert first == (None, None)
    assert "│ best      3.0000 at step 2  " in shown
    second, shown = trained(7, 3.5)
    assert second == (3.0, 2)
    assert "│ held out  3.5000  " in shown
    assert "│ best      3.0000 at step 2  " in shown
    third, shown = trained(8, 2.5)
    assert third == (3.0, 2)
    assert "│ best      2.5000 at step 8  " in shown
