"""What a log shows of a run."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from events_of_a_run import started, step
from rich.console import Console

from penstock.progress import LineView
from penstock.progress.log import event_lines, show_loss, step_line
from penstock.progress.state import Progress
from penstock.telemetry.events import (
    Compiling,
    Evaluated,
    Evaluating,
    Finished,
    Notice,
    RunMeasured,
    Saved,
    Stopped,
)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def lines_of(every, events, quiet=False, clock=None):
    console = Console(record=True, width=40, file=io.StringIO())
    with LineView(console, every, quiet, clock or Clock()) as view:
        for event in events:
            if clock is not None and hasattr(event, "learning_rate"):
                clock.now += event.seconds
            view(event)
    return console.export_text().splitlines()


def test_log_has_line_per_interval_and_event(clock):
    events = [
        started(),
        *(step(number) for number in range(1, 24)),
        Evaluated(23, 3.1, 22.198, 1.0, best=True),
        Evaluated(24, 3.2, 24.53, 1.0, best=False, accuracy=0.3333, bits_per_byte=1.28),
        Evaluated(25, 3.2, 24.53, 1.0, best=False, accuracy=0.5, exact_match=0.125),
        Saved(23, Path("runs/x/checkpoints/step-00000023"), 3.0, 1 << 30),
        Notice("7 texts were [empty]"),
        Stopped(23, "SIGTERM", "penstock train x.yaml"),
    ]
    assert lines_of(10, events, clock=clock) == [
        "gpt2: 124M parameters, 475 MiB of weights in fp32, computed on cpu",
        "100 steps of 16.4k tokens (8 micro-batches of 4), 1.25 epochs of the training data, in "
        "runs/x",
        "store: 2.00 GiB of memory for weights, gradients and optimizer state; engine: at most "
        "4.00 GiB, 3 of 14 stages recomputed in the backward pass",
        "step 1/100  loss 10.0000 nats per token  learning rate 0.0003  gradient norm 2  8.19k "
        "tokens/s  477 MiB/s of weights  engine 3.00 GiB  epoch 0.01  2.0 s elapsed",
        "step 10/100  loss 1.0000 nats per token  learning rate 0.0003  gradient norm 2  8.19k "
        "tokens/s  477 MiB/s of weights  engine 3.00 GiB  epoch 0.12  20.0 s elapsed  "
        "3 min 00 s left",
        "step 20/100  loss 0.5000 nats per token  learning rate 0.0003  gradient norm 2  8.19k "
        "tokens/s  477 MiB/s of weights  engine 3.00 GiB  epoch 0.25  40.0 s elapsed  "
        "2 min 40 s left",
        "step 23  held-out loss 3.1000  best so far",
        "step 24  held-out loss 3.2000 nats per token, 1.2800 bits per byte  perplexity 24.53  "
        "accuracy 33.3%",
        "step 25  held-out loss 3.2000 nats per token  perplexity 24.53  accuracy 50.0%  "
        "exact match 12.5%",
        "step 23  saved runs/x/checkpoints/step-00000023 (1.00 GiB, 3.0 s)",
        "note: 7 texts were [empty]",
        "stopped after step 23: SIGTERM",
        "resume with: penstock train x.yaml",
    ]


def test_resumed_run_names_step_and_custom_loss_has_no_unit():
    own = replace(
        started(resumed_from=30), loss_unit="", row_name="rows", steps_per_epoch=None,
        micro_batches=1, flash_bytes=3 << 30,
    )  # fmt: skip
    lines = lines_of(10, [own, step(31), step(40)])
    assert lines[1] == (
        "100 steps of 16.4k rows (1 micro-batch of 4), in runs/x, resumed from step 30"
    )
    assert lines[2].startswith("store: 2.00 GiB of memory and 3.00 GiB of flash for weights, ")
    assert lines[3].startswith("step 40/100  loss 0.2500  learning rate 0.0003  ")
    assert " rows/s  " in lines[3]
    assert "epoch" not in lines[3]


def test_log_of_resumed_run_names_recorded_best_loss():
    resumed = replace(started(resumed_from=500), best_loss=3.0, best_step=400)
    worse = Evaluated(600, 3.5, 33.1, 1.0, best=False)
    better = Evaluated(700, 2.9, 18.2, 1.0, best=True)
    lines = lines_of(10, [resumed, worse, better])
    assert lines[1].endswith(
        ", in runs/x, resumed from step 500, best held-out loss so far 3.0000 at step 400"
    )
    assert lines[3:] == [
        "step 600  held-out loss 3.5000",
        "step 700  held-out loss 2.9000  best so far",
    ]
    without_step = replace(resumed, best_step=None)  # recorded by an older version
    assert lines_of(10, [without_step])[1].endswith(", best held-out loss so far 3.0000")
    assert "best" not in "".join(lines_of(10, [started(resumed_from=500), worse]))


def test_number_of_trained_parameters_is_shown_if_some_are_frozen():
    tuned = replace(started(), trainable_parameters=294_912)
    expected = "gpt2: 124M parameters, 295k of them trained, 475 MiB of weights in fp32, "
    assert lines_of(10, [tuned])[0].startswith(expected)


def test_step_line_shows_flash_traffic():
    on_flash = replace(
        step(10), flash_read_bytes=3 << 20, flash_written_bytes=2 << 20, flash_wait_seconds=0.5
    )
    *_, line = lines_of(10, [started(), on_flash])
    assert "  flash 3.00 MiB read, 2.00 MiB written per step, 25% waiting  " in line


def test_last_step_always_has_line():
    lines = lines_of(10, [started(steps=3), step(1), step(2), step(3)])
    assert [line.split()[1] for line in lines[3:]] == ["1/3", "3/3"]
    assert "left" not in lines[-1]


def test_slow_steps_have_lines_between_those_of_the_interval(clock):
    slow = [started(), *(step(number, seconds=12.0) for number in range(1, 13))]
    shown = [line.split()[1] for line in lines_of(10, slow, clock=clock)[3:]]
    assert shown == ["1/100", "4/100", "7/100", "10/100"]
    slower = [started(), *(step(number, seconds=400.0) for number in range(1, 5))]
    lines = lines_of(10, slower, clock=clock)[3:]
    assert [line.split()[1] for line in lines] == ["1/100", "2/100", "3/100", "4/100"]
    assert "left" not in lines[0]
    assert lines[1].endswith("  13 min 20 s elapsed  about 10 h 53 min left")
    assert lines[2].endswith("  20 min 00 s elapsed  10 h 46 min left")


def test_line_of_another_event_ends_the_silence(clock):
    events = [
        started(),
        step(1, seconds=1.0),
        step(2, seconds=29.0),
        Notice("read me"),
        step(3, seconds=29.0),
        step(4, seconds=1.0),
    ]
    assert [line.split()[1] for line in lines_of(10, events, clock=clock)[3:]] == [
        "1/100",
        "read",
        "4/100",
    ]


def test_steps_outside_run_have_no_line():
    assert lines_of(1, [step(1), step(2)]) == []


def test_quiet_view_shows_only_required_events():
    events = [
        started(),
        step(1),
        step(10),
        Evaluated(10, 3.1, 22.2, 1.0, best=True),
        Notice("read me"),
        Finished({"loss": 3.14159265, "best_held_out_loss": 3.5, "steps": 10, "store_bytes": 2048}),
    ]
    assert lines_of(10, events, quiet=True) == ["note: read me"]
    assert lines_of(10, [started(), Stopped(1, "Ctrl-C", "penstock train a.yaml")], quiet=True) == [
        "stopped after step 1: Ctrl-C",
        "resume with: penstock train a.yaml",
    ]


def test_log_names_compilation_unless_it_is_quiet():
    line = "compiling kernels for this processor, which later runs use again"
    assert lines_of(10, [started(), Compiling(0), Compiling(9, again=True)])[3:] == [line]
    assert lines_of(10, [started(), Compiling(0)], quiet=True) == []


def test_batch_of_an_evaluation_has_a_line_after_a_silence(clock):
    def events():
        yield started()
        yield step(1)
        for batch in range(1, 5):
            clock.now += 20
            yield Evaluating(1, batch, 4)

    assert [line for line in lines_of(1, events(), clock=clock) if "evaluating" in line] == [
        "step 1  evaluating: batch 2 of 4",
        "step 1  evaluating: batch 4 of 4",
    ]


@pytest.mark.parametrize(
    ("preparation", "shown"), [(56.8, ", preparation before it 56.8 s"), (4.9, "")]
)
def test_end_of_a_run_tells_a_long_preparation_apart_from_its_time(preparation, shown):
    summary = {"steps": 60, "seconds": 58.7, "store_bytes": 2048}
    assert event_lines(Finished({**summary, "preparation_seconds": preparation}, 60)) == [
        f"finished: steps 60, time 58.7 s{shown}, store 2.00 KiB"
    ]


def test_end_of_a_resumed_run_tells_its_steps_and_those_done_now():
    assert event_lines(Finished({"steps": 20, "loss": 3.5}, 60)) == [
        "finished: steps 60, 20 of them now, loss 3.5000"
    ]
    assert event_lines(Finished({"steps": 60, "loss": 3.5}, 60)) == [
        "finished: steps 60, loss 3.5000"
    ]


def test_time_left_excludes_compilation():
    progress = Progress().after(started(steps=100))
    progress = progress.after(step(1, seconds=60.0))
    assert progress.seconds_left is None
    assert " left" not in step_line(progress)
    progress = progress.after(step(2, seconds=30.0))  # the first one compiles most
    assert step_line(progress).endswith("  about 49 min 00 s left")
    progress = progress.after(step(3, seconds=1.0))
    assert progress.seconds_left == 97
    assert step_line(progress).endswith("  1 min 37 s left")


def test_speed_is_mean_of_recent_steps():
    progress = Progress().after(started(steps=1000))
    for number in range(1, 101):
        progress = progress.after(step(number, seconds=100.0))
    for number in range(101, 131):
        progress = progress.after(step(number, seconds=1.0))
    assert progress.seconds_per_step == 1.0
    assert progress.tokens_per_second == 16384
    assert progress.seconds_left == 870


def test_end_of_run_reports_traffic_disk_and_memory():
    measured = RunMeasured(
        step=10, steps=10, seconds=86400.0, step_seconds=10.0, compute_seconds=9.0,
        flash_wait_seconds=0.0, weight_seconds=1.0, update_seconds=0.0, snapshot_seconds=0.0,
        flash_read_bytes=0, flash_written_bytes=0, flash_rule_read_bytes=0,
        flash_rule_written_bytes=0, checkpoint_bytes=2**40, peak_rss_bytes=2**30,
        streamed_bytes=240 * 2**20, gradient_bytes=290 * 2**20,
    )  # fmt: skip
    assert event_lines(measured) == [
        "a step's time: compute 90%, moving weights and gradients 10%",
        "a step's traffic: 24.0 MiB of weights were sent from the store to the engine, for the "
        "forward and again for the backward pass, and 29.0 MiB of gradients were returned once",
        "disk: 1.00 TiB written; at this rate 1.00 TiB per day, and a disk rated for 546 TiB "
        "written (600 TB in its data sheet) lasts 545 d 16 h",
        "memory: the process used 1.00 GiB at its peak",
    ]
    early = replace(measured, flash_speculated_bytes=50 * 2**20, flash_discarded_bytes=10 * 2**20)
    assert event_lines(early)[2] == (
        "updates before the commit, per step: 5.00 MiB adopted, 1.00 MiB thrown away"
    )
    little = replace(measured, checkpoint_bytes=2**30)  # a disk would last for centuries
    assert event_lines(little)[2] == "disk: 1.00 GiB written; at this rate 1.00 GiB per day"
    long_enough = replace(measured, seconds=600.0)
    assert "; at this rate 144 TiB per day, and a disk" in event_lines(long_enough)[2]
    short = replace(measured, seconds=599.0)  # most of which one checkpoint can be
    assert event_lines(short)[2] == "disk: 1.00 TiB written"


@pytest.mark.parametrize(
    ("loss", "shown"),
    [(6.25, "6.2500"), (0.01, "0.0100"), (0.0003124, "0.000312"), (0.0, "0.0000")],
)
def test_small_loss_keeps_three_digits(loss, shown):
    assert show_loss(loss, "") == shown


def test_log_of_a_sparse_run():
    sparse_run = replace(
        started(), sparse_weights=4, sparse_entries=10_000, sparse_elements=100_000,
        sparse_method="rigl",
    )  # fmt: skip
    assert event_lines(sparse_run)[0] == (
        "gpt2: 124M parameters, 475 MiB of weights in fp32, computed on cpu; 4 weights are sparse "
        "(rigl): 10.0k of 100k entries exist, sparsity 90.00%"
    )
    progress = Progress(Clock()).after(sparse_run).after(replace(step(1), sparsity=0.9))
    assert "  sparsity 90.00%  " in step_line(progress)
    progress = progress.after(replace(step(2), sparsity=0.75, changed_entries=600))
    progress = progress.after(replace(step(3), sparsity=0.75))
    assert "  sparsity 75.00%, 600 entries changed at step 2  " in step_line(progress)
    dense = Progress(Clock()).after(started()).after(step(1))
    assert "sparsity" not in step_line(dense)


def test_log_tells_each_change_of_masks_once():
    printed = io.StringIO()
    view = LineView(Console(file=printed, width=300), every=2, clock=Clock())
    view(started(steps=12))
    changes = {3: 600, 5: 500, 7: 9_000, 9: 100, 10: 20}  # in step 7 that of `densify_at`
    for number in range(1, 13):
        sparsity = 0.9 if number < 7 else 0.0
        view(replace(step(number), sparsity=sparsity, changed_entries=changes.get(number, 0)))
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("step ")]
    told = [re.search(r"sparsity (.*?)  ", line)[1] for line in lines]
    assert told == [
        "90.00%",
        "90.00%",
        "90.00%, 600 entries changed at step 3",
        "90.00%, 500 entries changed at step 5",
        "0.00%, 9.00k entries changed at step 7",
        "0.00%, 120 entries changed since step 8",
        "0.00%",
    ]
