"""What a terminal and a log show of a run."""

import io
from dataclasses import replace
from pathlib import Path

from events_of_a_run import started, step
from rich.console import Console

from penstock.cli.view import LineView, LiveView, Progress, panel
from penstock.events import Evaluated, Finished, Notice, Saved, Stopped


def shown(renderable, width=120):
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def lines_of(every, events, quiet=False, width=40):
    console = Console(record=True, width=width, file=io.StringIO())
    with LineView(console, every, quiet) as view:
        for event in events:
            view(event)
    return console.export_text().splitlines()


def test_the_panel_shows_loss_speed_time_left_traffic_and_memory_with_budgets():
    progress = Progress()
    for event in (started(), *(step(number) for number in range(1, 41))):
        progress(event)
    progress(Evaluated(40, 3.1, 22.2, 1.0, best=True))
    progress(Saved(40, Path("runs/x/checkpoints/step-00000040"), 3.0, 1 << 30))
    text = shown(panel(progress))
    for part in (
        "gpt2  124M parameters",
        "40 / 100",
        "0.2500",
        "█",
        "3.1000   best 3.1000 at step 40",
        # 16384 tokens in 2 s; 60 steps of 2 s to go; 1 GB in 2 s.
        "8.19k tokens/s   2.0 s per step   2 min 00 s left",
        "500 MB/s   954 MiB of weights out and 500 MiB of gradients in per step",
        "rate 0.0003   gradient norm 2, clipped to 0.50 of it",
        "3.00 GiB of 4.00 GiB",
        "1.00 GiB of 2.00 GiB",
        "step 40, 1.00 GiB",
        "runs/x   fp32 on cpu",
    ):
        assert part in text, f"{part!r} is not in\n{text}"


def test_how_many_parameters_are_trained_is_said_where_it_is_not_all():
    tuned = replace(started(), trainable_parameters=294_912)
    expected = "124M parameters, 295k of them trained"
    progress = Progress()
    progress(tuned)
    assert expected in shown(panel(progress))
    assert lines_of(10, [tuned])[0].startswith(f"gpt2: {expected}, fp32 on cpu; ")


def test_the_panel_before_the_first_step():
    assert shown(panel(Progress())).strip() == "preparing ..."
    progress = Progress()
    progress(started(resumed_from=30))
    assert "30 / 100" in shown(panel(progress))


def test_speed_is_that_of_recent_steps():
    progress = Progress()
    progress(started(steps=1000))
    for number in range(1, 101):
        progress(step(number, seconds=100.0))
    for number in range(101, 131):
        progress(step(number, seconds=1.0))
    assert progress.seconds_per_step == 1.0
    assert progress.tokens_per_second == 16384
    assert progress.seconds_left == 870


def test_a_log_has_one_line_every_few_steps_and_one_per_event():
    events = [
        started(),
        *(step(number) for number in range(1, 24)),
        Evaluated(23, 3.1, 22.198, 1.0, best=True),
        Evaluated(24, 3.2, 24.53, 1.0, best=False, accuracy=0.3333),
        Evaluated(25, 3.2, 24.53, 1.0, best=False, accuracy=0.5, exact_match=0.125),
        Saved(23, Path("runs/x/checkpoints/step-00000023"), 3.0, 1 << 30),
        Notice("7 texts were [empty]"),
        Stopped(23, "SIGTERM", "penstock train x.yaml"),
    ]
    assert lines_of(10, events) == [
        "gpt2: 124M parameters, fp32 on cpu; 475 MiB streamed per sweep, store 2.00 GiB, engine "
        "budget 4.00 GiB",
        "100 steps of 16.4k tokens (8 micro-batches of 4), 3 of 14 stages recomputed, in runs/x",
        "step 1/100  loss 10.0000  rate 0.0003  norm 2  8.19k tokens/s  stream 500 MB/s  "
        "gradients 500 MiB  engine 3.00 GiB  left 3 min 18 s",
        "step 10/100  loss 1.0000  rate 0.0003  norm 2  8.19k tokens/s  stream 500 MB/s  "
        "gradients 500 MiB  engine 3.00 GiB  left 3 min 00 s",
        "step 20/100  loss 0.5000  rate 0.0003  norm 2  8.19k tokens/s  stream 500 MB/s  "
        "gradients 500 MiB  engine 3.00 GiB  left 2 min 40 s",
        "step 23  held-out loss 3.1000  perplexity 22.2  best so far",
        "step 24  held-out loss 3.2000  perplexity 24.53  accuracy 33.3%",
        "step 25  held-out loss 3.2000  perplexity 24.53  accuracy 50.0%  exact match 12.5%",
        "step 23  saved runs/x/checkpoints/step-00000023 (1.00 GiB, 3.0 s)",
        "note: 7 texts were [empty]",
        "stopped after step 23: SIGTERM",
        "resume with: penstock train x.yaml",
    ]


def test_what_a_step_moved_on_flash_and_waited_for_it():
    on_flash = replace(
        step(10), flash_read_bytes=3 << 20, flash_written_bytes=2 << 20, flash_wait_seconds=0.5
    )
    *_, line = lines_of(10, [started(), on_flash])
    assert "flash 3.00 MiB read, 2.00 MiB written per step, 25% of the time waiting  " in line


def test_the_last_step_always_has_a_line():
    lines = lines_of(10, [started(steps=3), step(1), step(2), step(3)])
    assert [line.split()[1] for line in lines[2:]] == ["1/3", "3/3"]


def test_quiet_says_only_what_must_be_read():
    events = [
        started(),
        step(1),
        step(10),
        Evaluated(10, 3.1, 22.2, 1.0, best=True),
        Notice("read me"),
        Finished({"loss": 3.14159265, "steps": 10}),
    ]
    assert lines_of(10, events, quiet=True) == [
        "note: read me",
        "finished: loss 3.1416, steps 10",
    ]


def test_the_live_view_keeps_what_must_not_scroll_away():
    console = Console(record=True, width=120, file=io.StringIO(), force_terminal=True)
    with LiveView(console) as view:
        view(started())
        view(step(1))
        view(Stopped(1, "Ctrl-C", "penstock train x.yaml engines=2"))
    text = console.export_text()
    assert "stopped after step 1: Ctrl-C\nresume with: penstock train x.yaml engines=2" in text
    assert "1 / 100" in text
