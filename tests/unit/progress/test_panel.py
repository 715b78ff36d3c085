"""The panel of a run: what it says, and that it fits 80 columns."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from events_of_a_run import started, step
from rich.cells import cell_len
from rich.console import Console

from penstock.progress import LiveView
from penstock.progress.panel import panel
from penstock.progress.state import LossHistory, Progress
from penstock.telemetry.events import Compiling, Evaluated, Evaluating, Notice, Saved, Stopped


def shown(renderable, width=80):
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def progress_of(*events, seconds=0.0):
    now = [0.0]
    progress = Progress(lambda: now[0])
    for event in events:
        progress = progress.after(event)
    now[0] += seconds
    return progress


WHOLE = (
    replace(started(resumed_from=20), flash_bytes=40 << 30),
    *(step(number) for number in range(21, 61)),
    Evaluated(60, 3.1, 22.2, 1.0, best=True, accuracy=0.25, bits_per_byte=1.24),
    Saved(60, Path("runs/x/checkpoints/step-00000060"), 3.0, 1 << 30),
)


def test_panel_fits_80_columns():
    text = shown(panel(progress_of(*WHOLE, seconds=125.0)))
    for part in (
        "gpt2  124M parameters",
        "│ step      ━━━━━━━━━━━━────────  60 / 100   resumed from step 20  ",
        "│ time      2 min 05 s elapsed   1 min 20 s left  ",
        "│ data      epoch 0.75   983k tokens seen  ",
        "│ loss      0.1667 nats per token  ██▇▇",
        "│ held out  3.1000 nats per token, 1.2400 bits per byte  ",
        "│           accuracy 25.0%  ",
        "│ best      3.1000 at step 60  ",
        "│ speed     8.19k tokens/s   2.0 s per step  ",
        "│ stream    477 MiB/s   954 MiB of weights, 500 MiB of gradients a step │",
        "│ update    learning rate 0.0003   gradient norm 2, clipped to 1  ",
        "│ engine    ━━━━━━━━━━━━━━━─────  3.00 GiB of 4.00 GiB  ",
        "│ store     ━━━━━━━━━━──────────  1.00 GiB of 2.00 GiB  ",
        "│ flash     40.0 GiB   0 B read, 0 B written per step, 0% waiting  ",
        "│ saved     step 60, 1.00 GiB  ",
        "runs/x   fp32 on cpu",
    ):
        assert part in text, f"{part!r} is not in\n{text}"


def test_panel_shows_the_batch_of_an_evaluation_until_it_ends():
    text = "20 / 100   evaluating: batch 3 of 10"
    during = (started(), step(20), Evaluating(20, 3, 10), Notice("a checkpoint was delayed"))
    assert text in shown(panel(progress_of(*during)))
    for end in (Evaluated(20, 3.1, 22.2, 1.0, best=True), step(21), Stopped(20, "Ctrl-C", "")):
        assert "evaluating" not in shown(panel(progress_of(*during, end)))


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_only_values_wrap_at_any_width(width):
    lines = shown(panel(progress_of(*WHOLE)), width).splitlines()
    assert max(map(cell_len, lines)) <= min(width, 80)
    labels = [
        line.strip("│ ").split("  ")[0] for line in lines if line[2:3].strip() and "│" in line
    ]
    assert labels == [
        "step", "time", "data", "loss", "held out", "best", "speed", "stream", "update", "engine",
        "store", "flash", "saved",
    ]  # fmt: skip
    assert "…" not in "".join(lines)


def test_longest_values_fit_80_columns():
    longest = replace(
        step(199_999, loss=123.4567), flash_read_bytes=123 << 20, flash_written_bytes=123 << 20,
        flash_wait_seconds=2.0, learning_rate=1.23e-05, grad_norm=123.0, clip_scale=0.0123,
        streamed_bytes=123 << 20, gradient_bytes=123 << 20,
    )  # fmt: skip
    events = [
        replace(started(steps=200_000, resumed_from=123_456), flash_bytes=123 << 30),
        *(replace(longest, step=number) for number in range(199_900, 200_000)),
    ]
    text = shown(panel(progress_of(*events, seconds=86399)))
    assert len(text.splitlines()) == 2 + 10
    assert len(shown(panel(progress_of(*events, seconds=86399)), 200).splitlines()) == 2 + 10


def test_sparsity_and_last_change_of_masks():
    sparse = replace(step(3), sparsity=0.9, flops=3 * 10**9)
    steps = [replace(sparse, step=2, changed_entries=12_345), sparse]
    text = shown(panel(progress_of(started(), *steps)))
    assert "│ sparsity  90.00%, 12.3k entries changed at step 2  " in text
    assert "│           3.00 GFLOP a step  " in text
    assert "sparsity" not in shown(panel(progress_of(*WHOLE)))


def test_number_of_trained_parameters_is_shown_if_some_are_frozen():
    tuned = replace(started(), trainable_parameters=294_912)
    assert "124M parameters, 295k of them trained" in shown(panel(progress_of(tuned)))


def test_panel_before_first_step():
    assert shown(panel(Progress())).strip() == "preparing ..."
    text = shown(panel(progress_of(started(resumed_from=30))))
    assert "30 / 100   resumed from step 30" in text
    assert " left" not in text


def test_panel_estimates_the_time_left_from_the_second_step_on():
    steps = [step(1, seconds=60.0), step(2, seconds=30.0), step(3, seconds=20.0)]
    for count, left in enumerate(["", "   about 49 min 00 s left", "   32 min 20 s left"], 1):
        text = shown(panel(progress_of(started(), *steps[:count], seconds=120.0)))
        assert f"│ time      2 min 00 s elapsed{left} " in text


def best_row(*events):
    view = LiveView(Console(file=io.StringIO()))
    for event in events:
        view(event)
    rows = [row for row in shown(view.render()).splitlines() if row.startswith("│ best ")]
    assert len(rows) <= 1
    return rows[0].strip("│ ").removeprefix("best").strip() if rows else None


def test_resumed_run_shows_recorded_best_loss():
    resumed = replace(started(steps=1000, resumed_from=500), best_loss=3.0, best_step=400)
    worse = Evaluated(600, 3.5, 33.1, 1.0, best=False)
    better = Evaluated(700, 2.9, 18.2, 1.0, best=True)
    assert best_row(resumed) == "3.0000 at step 400"
    assert best_row(resumed, worse) == "3.0000 at step 400"
    assert best_row(resumed, worse, better) == "2.9000 at step 700"
    assert best_row(replace(resumed, best_step=None), worse) == "3.0000"  # of an older version


def test_best_loss_has_no_row_until_known():
    worse = Evaluated(600, 3.5, 33.1, 1.0, best=False)
    assert best_row(started()) is None
    assert best_row(started(resumed_from=500), worse) is None
    assert best_row(Evaluated(0, 9.0, 8103.1, 1.0, best=False), started()) is None  # untrained


def test_urgent_message_is_below_the_steps_also_in_a_short_terminal():
    text = shown(panel(progress_of(started()), "stopping after this step"))
    assert "│           stopping after this step" in text.splitlines()[2]


def test_panel_shows_that_kernels_are_compiled_until_a_step_or_an_evaluation():
    during = (started(), step(20), Compiling(20, again=True), Notice("a checkpoint was delayed"))
    assert "20 / 100   compiling kernels" in shown(panel(progress_of(*during)))
    for end in (Evaluating(20, 1, 10), Evaluated(20, 3.1, 22.2, 1.0, best=True), step(21)):
        assert "compiling" not in shown(panel(progress_of(*during, end)))


def test_loss_history_is_bounded():
    history = LossHistory()
    for number in range(100_000):
        history = history.after(100.0 - number / 1000)
    assert 500 <= len(history.means) <= 1024
    assert list(history.means) == sorted(history.means, reverse=True)
    assert history.means[0] == pytest.approx(100.0, abs=0.2)
    assert history.means[-1] == pytest.approx(0.0, abs=0.3)
