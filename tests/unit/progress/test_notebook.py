"""What a notebook shows of a run."""

import sys
from dataclasses import replace
from types import SimpleNamespace

from events_of_a_run import started, step

from penstock.progress import LineView, LiveView, NotebookView, SilentView, view_from_python
from penstock.progress.choice import in_notebook
from penstock.telemetry.events import Evaluated, Evaluating, Finished


class Display:
    """As `IPython.display.display`: remembers each output and what it was updated to."""

    def __init__(self):
        self.outputs = []

    def __call__(self, content, *, raw, display_id):
        assert raw
        assert display_id
        shown = [content["text/plain"]]
        self.outputs.append(shown)
        return SimpleNamespace(update=lambda new, raw: shown.append(new["text/plain"]))


def test_notebook_output_updates_at_most_four_times_a_second(capsys):
    now = [0.0]
    display = Display()
    view = NotebookView(display, lambda: now[0])
    with view:
        view(started())
        for number in range(1, 101):
            now[0] += 0.1
            view(step(number))
        view(Evaluated(100, 3.1, 22.2, 1.0, best=True))
        view(Finished({"steps": 100}))
    (shown,) = display.outputs
    assert shown[0].startswith("step 1/100  loss 10.0000 nats per token  ")
    assert shown[-1].startswith("step 100/100  loss 0.1000 nats per token  ")
    assert 30 < len(shown) < 42
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("gpt2: 124M parameters, ")
    assert printed[-2:] == [
        "step 100  held-out loss 3.1000  best so far",
        "finished: steps 100",
    ]


def test_notebook_shows_the_batch_of_an_evaluation():
    now, display = [0.0], Display()
    with NotebookView(display, lambda: now[0]) as view:
        view(started())
        view(step(1))
        now[0] += 1
        view(Evaluating(1, 2, 10))
        view(Evaluated(1, 3.1, 22.2, 1.0, best=True))
    (shown,) = display.outputs
    assert [text.endswith("  evaluating: batch 2 of 10") for text in shown] == [False, True, False]


def test_notebook_of_resumed_run_names_recorded_best_loss(capsys):
    with NotebookView(Display()) as view:
        view(replace(started(resumed_from=500), best_loss=3.0, best_step=400))
        view(Evaluated(600, 3.5, 33.1, 1.0, best=False))
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].endswith(
        ", resumed from step 500, best held-out loss so far 3.0000 at step 400"
    )
    assert printed[-1] == "step 600  held-out loss 3.5000"


def test_second_train_call_has_own_output():
    display = Display()
    view = NotebookView(display)
    for _ in range(2):
        with view:
            view(started())
            view(step(1))
    assert len(display.outputs) == 2


def test_view_is_chosen_by_environment(monkeypatch):
    assert isinstance(view_from_python(10, quiet=True), SilentView)
    assert isinstance(view_from_python(10, quiet=False), LineView)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(view_from_python(10, quiet=False), LiveView)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(view_from_python(10, quiet=False), LineView)
    for shell, expected in (
        (None, False),
        (SimpleNamespace(), False),  # IPython in a terminal
        (SimpleNamespace(kernel=object()), True),
    ):
        ipython = SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        assert in_notebook() is expected
    assert isinstance(view_from_python(10, quiet=False), NotebookView)
