"""The view of a run as lines of text, for logs and pipes: one every few steps, one per event."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from penstock.progress.cycles import cycle_lines
from penstock.progress.figures import (
    show_bytes,
    show_comparable_durations,
    show_count,
    show_duration,
    show_flops,
    show_rate,
    show_shares,
    show_sparsity,
)
from penstock.progress.state import Progress
from penstock.progress.view import SHOWN_IF_QUIET, View, show_on_stderr
from penstock.telemetry import (
    FIRST_STEPS,
    ClusterEvent,
    Compiling,
    Evaluated,
    Evaluating,
    Event,
    Finished,
    Notice,
    RunMeasured,
    RunStarted,
    Saved,
    StepDone,
    Stopped,
)

# A slow run shows that it goes on: the first step that ends so long after the last line has one;
# so has the first batch of an evaluation that begins so long after it.
_LONGEST_SILENCE_SECONDS = 30.0
# The usual endurance rating of a consumer disk of 1 TB; the rating is proportional to the size.
RATED_BYTES = 600 * 10**12
# A disk is replaced after some years, whatever is written to it.
LIFETIME_WORTH_SAYING = 5 * 365 * 86400.0
# What a shorter run has written is mostly its checkpoints, whose interval it may not have reached.
SECONDS_OF_A_RATE = 600.0
# A shorter preparation of a run is not worth a figure at its end.
_LONG_PREPARATION_SECONDS = 5.0
# Less hardly shows in the time of a step.
_BUSY_SHARE = 0.05
_SHARE_OF_A_HINT = 0.25  # threads then wait for each other often

_NAMES_OF_PARTS = {
    "compute_seconds": "compute",
    "flash_wait_seconds": "waiting for flash",
    "weight_seconds": "moving weights and gradients",
    "update_seconds": "updates",
    "snapshot_seconds": "waiting for a checkpoint",
}


class LineView(View):
    """Writes readable lines: one every `every` steps, of slow steps more, and one per other event.

    **Arguments:** `clock` returns seconds.
    """

    def __init__(
        self,
        console: Console,
        every: int,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._every = every
        self._quiet = quiet
        self._clock = clock
        self._printed_at = clock()
        self._progress = Progress(clock)
        self._changes: list[StepDone] = []  # which changed masks since the last line of a step

    def __call__(self, event: Event) -> None:
        self._progress = self._progress.after(event)
        started = self._progress.started
        if isinstance(event, StepDone):
            if started is None or self._quiet:
                return  # a step outside of `train`
            self._changes = [change for change in self._changes if change.step < event.step]
            if event.changed_entries:
                self._changes.append(event)
            silence = self._clock() - self._printed_at
            is_due = event.step % self._every == 0 or silence >= _LONGEST_SILENCE_SECONDS
            if is_due or event.step in (1, started.steps):
                self._print(step_line(self._progress, self._changes))
                self._changes = []
        elif isinstance(event, Evaluating):
            if not self._quiet and self._clock() - self._printed_at >= _LONGEST_SILENCE_SECONDS:
                self._print(f"step {event.step}  {evaluating(self._progress)}")
        elif not self._quiet or isinstance(event, SHOWN_IF_QUIET):
            for line in event_lines(event, self._progress.loss_unit):
                self._print(line)

    def interrupt(self, text: str) -> None:
        """Write the text to stderr at once."""
        show_on_stderr(text)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._printed_at = self._clock()


def step_line(progress: Progress, changes: Sequence[StepDone] | None = None) -> str:
    """Return the line of the last step; `changes` as of `sparsity_of`."""
    started, last = progress.started, progress.last
    assert started is not None
    assert last is not None
    parts = [
        f"step {last.step}/{started.steps}",
        f"loss {show_loss(last.loss, started.loss_unit)}",
        f"learning rate {last.learning_rate:.3g}",
        f"gradient norm {last.grad_norm:.3g}",
        f"{show_count(progress.tokens_per_second)} {started.row_name}/s",
        f"{show_rate(progress.streamed_per_second)} of weights",
        f"engine {show_bytes(last.engine_bytes)}",
    ]
    if last.sparsity is not None:
        parts.append(f"sparsity {sparsity_of(progress, changes)}")
    if last.cycles is not None:
        parts.append(f"{show_count(last.cycles.closed_form + last.cycles.simulated)} cycles")
    if last.flash_written_bytes:
        parts.append(f"flash {flash_traffic(last)}")
    if progress.epochs is not None:
        parts.append(f"epoch {progress.epochs:.2f}")
    parts.append(f"{show_duration(progress.seconds_elapsed)} elapsed")
    if left := time_left(progress):
        parts.append(left)
    return "  ".join(parts)


def evaluating(progress: Progress) -> str:
    """Return which batch of an evaluation is computed."""
    assert progress.evaluating is not None
    return f"evaluating: batch {progress.evaluating.batch} of {progress.evaluating.batches}"


def time_left(progress: Progress) -> str:
    """Return the estimated time of the remaining steps; empty if there is no estimate."""
    if progress.seconds_left is None:
        return ""
    about = "about " if progress.is_left_rough else ""
    return f"{about}{show_duration(progress.seconds_left)} left"


def sparsity_of(progress: Progress, changes: Sequence[StepDone] | None = None) -> str:
    """Return the sparsity after the last step, and how many entries `changes` of the masks dropped
    or grew.

    **Arguments:** `changes` are in the order of their steps; by default the last one of the run.
    """
    last = progress.last
    assert last is not None
    assert last.sparsity is not None
    text = show_sparsity(last.sparsity)
    if changes is None:
        changes = [] if progress.mask_change is None else [progress.mask_change]
    if not changes:
        return text
    entries = show_count(sum(change.changed_entries for change in changes))
    first = changes[0].step
    when = f"at step {first}" if len(changes) == 1 else f"since step {first - 1}"
    return f"{text}, {entries} entries changed {when}"


def show_loss(loss: float, unit: str) -> str:
    """Return a loss with its unit; a loss of the user's own has no unit."""
    shown = f"{loss:.4f}" if abs(loss) >= 0.01 or loss == 0 else f"{loss:.3g}"
    return f"{shown} {unit}".rstrip()


def show_held_out_loss(event: Evaluated) -> str:
    """Return the loss of an evaluation with its units; a language model's loss is in nats."""
    bits = f", {event.bits_per_byte:.4f} bits per byte" if event.bits_per_byte is not None else ""
    return show_loss(event.loss, "nats per token" if _is_of_text(event) else "") + bits


def show_evaluation(event: Evaluated) -> str:
    """Return all metrics of an evaluation."""
    perplexity = f"  perplexity {event.perplexity:.4g}" if _is_of_text(event) else ""
    shares = show_shares(event.accuracy, event.exact_match)
    return f"loss {show_held_out_loss(event)}{perplexity}{shares}"


def show_best(loss: float, step: int | None) -> str:
    """Return the best held-out loss, with its step if it is known."""
    return f"{loss:.4f}" if step is None else f"{loss:.4f} at step {step}"


def _is_of_text(event: Evaluated) -> bool:
    return event.accuracy is not None


def parameters(started: RunStarted) -> str:
    """Return the number of parameters, and the number of trained ones if it differs."""
    trained = started.trainable_parameters
    part = f", {show_count(trained)} of them trained" if trained < started.parameters else ""
    return f"{show_count(started.parameters)} parameters{part}"


def flash_traffic(step: StepDone) -> str:
    """Return the flash traffic of a step, and the share of its time spent waiting for flash."""
    share = step.flash_wait_seconds / step.seconds
    return (
        f"{show_bytes(step.flash_read_bytes)} read, {show_bytes(step.flash_written_bytes)} written "
        f"per step, {share:.0%} waiting"
    )


def event_lines(event: Event, loss_unit: str = "") -> list[str]:
    """Return the log lines of an event other than a step."""
    if isinstance(event, RunStarted):
        return started_lines(event)
    if isinstance(event, Evaluated):
        best = "  best so far" if event.best else ""
        return [f"step {event.step}  held-out {show_evaluation(event)}{best}"]
    if isinstance(event, Compiling):
        text = "compiling kernels for this processor, which later runs use again"
        return [] if event.again else [text]
    if isinstance(event, Saved):
        return [
            f"step {event.step}  saved {event.path} ({show_bytes(event.bytes)}, "
            f"{show_duration(event.seconds)})"
        ]
    if isinstance(event, Notice):
        return [f"note: {event.text}"]
    if isinstance(event, ClusterEvent):
        return [f"cluster: {event.kind}: {event.text}"]
    if isinstance(event, RunMeasured):
        return measured_lines(event)
    if isinstance(event, Stopped):
        return [
            f"stopped after step {event.step}: {event.reason}",
            f"resume with: {event.resume_command}",
        ]
    if isinstance(event, Finished):
        if event.summary.get("steps") == 0:
            return []  # a notice has reported it
        return ["finished: " + _summary(event, loss_unit)]
    return []


def started_lines(run: RunStarted) -> list[str]:
    """Return the three lines at the head of a log: the model, the run, its memory."""
    epochs = ""
    if run.steps_per_epoch is not None:
        epochs = f", {run.steps / run.steps_per_epoch:.2f} epochs of the training data"
    resumed = f", resumed from step {run.resumed_from}" if run.resumed_from else ""
    if run.best_loss is not None:
        resumed += f", best held-out loss so far {show_best(run.best_loss, run.best_step)}"
    sparse = ""
    if run.sparse_weights:
        absent = 1 - run.sparse_entries / run.sparse_elements
        sparse = (
            f"; {run.sparse_weights} weights are sparse ({run.sparse_method}): "
            f"{show_count(run.sparse_entries)} of {show_count(run.sparse_elements)} entries exist, "
            f"sparsity {show_sparsity(absent)}"
        )
    many = "micro-batch" if run.micro_batches == 1 else "micro-batches"
    flash = f" and {show_bytes(run.flash_bytes)} of flash" if run.flash_bytes else ""
    return [
        f"{run.model}: {parameters(run)}, {show_bytes(run.weight_bytes)} of weights in "
        f"{run.precision}, computed on {run.device}{sparse}",
        f"{run.steps} steps of {show_count(run.tokens_per_step)} {run.row_name} "
        f"({run.micro_batches} {many} of {run.micro_batch}){epochs}, in {run.run_dir}{resumed}",
        f"store: {show_bytes(run.state_bytes)} of memory{flash} for weights, gradients and "
        f"optimizer state; engine: at most {show_bytes(run.engine_bytes)}, {run.recompute_stages} "
        f"of {run.stages} stages recomputed in the backward pass",
    ]


def measured_lines(run: RunMeasured) -> list[str]:
    """Return the bottleneck of a run, its transfers, and their cost in disk endurance."""
    parts = _usual_parts(run)
    took = sum(parts.values())
    shares = {_NAMES_OF_PARTS[key]: seconds / took for key, seconds in parts.items()}
    shown = ", ".join(
        f"{name} {share:.0%}"
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= 0.005
    )
    lines = [f"a step's time{_without_unusual(run)}: {shown}", "a step's traffic: " + traffic(run)]
    lines[1:1] = [*compared_lines(run), *busy_lines(run), *cycle_lines(run)]
    if run.sparsity is not None:
        lines.append(
            f"sparsity: {show_sparsity(run.sparsity)} of the sparse weights' entries do not exist; "
            f"{show_flops(run.flops)}FLOP in {run.steps} steps"
        )
    if run.flash_rule_written_bytes:
        lines.append(
            f"flash per step: {show_bytes(run.flash_read_bytes / run.steps)} read (predicted: at "
            f"most {show_bytes(run.flash_rule_read_bytes / run.steps)}), "
            f"{show_bytes(run.flash_written_bytes / run.steps)} written (predicted: "
            f"{show_bytes(run.flash_rule_written_bytes / run.steps)})"
        )
    if run.flash_speculated_bytes or run.flash_discarded_bytes:
        lines.append(
            f"updates before the commit, per step: "
            f"{show_bytes(run.flash_speculated_bytes / run.steps)} adopted, "
            f"{show_bytes(run.flash_discarded_bytes / run.steps)} thrown away"
        )
    lines += disk_lines(run)
    of = f" of {show_bytes(run.memory_bytes)} (memory)" if run.memory_bytes else ""
    lines.append(f"memory: the process used {show_bytes(run.peak_rss_bytes)}{of} at its peak")
    if run.memory_bytes and run.peak_rss_bytes > run.memory_bytes:
        lines.append(
            "note: that is more than `memory` allows; lower store.dram or engine.memory by the "
            "difference"
        )
    return lines


def disk_lines(run: RunMeasured) -> list[str]:
    """Return what a run has written to disk; at what rate, if the run was long enough for one."""
    written = run.flash_written_bytes + run.checkpoint_bytes
    if not written:
        return []
    line = f"disk: {show_bytes(written)} written"
    if run.seconds < SECONDS_OF_A_RATE:
        return [line]
    per_day = written / run.seconds * 86400
    line += f"; at this rate {show_bytes(per_day)} per day"
    seconds = RATED_BYTES / per_day * 86400
    if seconds < LIFETIME_WORTH_SAYING:
        line += (
            f", and a disk rated for {show_bytes(RATED_BYTES)} written "
            f"({RATED_BYTES // 10**12} TB in its data sheet) lasts {show_duration(seconds)}"
        )
    return [line]


def busy_lines(run: RunMeasured) -> list[str]:
    """Return what took this machine's cores meanwhile, if it was enough to slow the run."""
    if max(run.others_share, run.stolen_share) < _BUSY_SHARE:
        return []
    line = f"meanwhile other programs took {run.others_share:.0%} of this machine's cores"
    if run.stolen_share >= 0.01:
        line += f", and its host gave {run.stolen_share:.0%} to others"
    if max(run.others_share, run.stolen_share) >= _SHARE_OF_A_HINT:
        line += "; steps of a small model may be faster beside them with engine.threads: 1"
    return [line]


def compared_lines(run: RunMeasured) -> list[str]:
    """Return what the planner predicted of a step beside what happened, by resource.

    The step and its parts are means over the same steps, so that the parts add up to the step. A
    run that has only the first steps of its process, which compile, is not compared.
    """
    predicted = run.predicted
    if predicted is None or (run.usual_parts and run.steps <= FIRST_STEPS):
        return []
    usual = _usual_parts(run)
    took = sum(usual.values()) if run.usual_parts else run.step_seconds / run.steps
    parts = {key: (getattr(predicted, key, 0.0), after) for key, after in usual.items()}
    compared = {key: pair for key, pair in parts.items() if max(pair) >= 0.01 * took}
    durations = show_comparable_durations(
        [predicted.seconds, took, *itertools.chain(*compared.values())]
    )
    shown = [
        f"{_NAMES_OF_PARTS[key]} {before}, was {after}"
        for key, before, after in zip(compared, durations[2::2], durations[3::2], strict=True)
    ]
    lines = [
        f"a step was predicted to take {durations[0]} and took {durations[1]} "
        f"({took / predicted.seconds - 1:+.0%}): {'; '.join(shown)}"
    ]
    if predicted.peak_memory_bytes:
        error = run.peak_rss_bytes / predicted.peak_memory_bytes - 1
        lines.append(
            f"the process was predicted to use {show_bytes(predicted.peak_memory_bytes)} and used "
            f"{show_bytes(run.peak_rss_bytes)} ({error:+.0%})"
        )
    if predicted.host_was_busy:
        lines.append(
            "the host was busy while it was measured for predictions: run `penstock calibrate "
            "--forget` when it is idle"
        )
    return lines


def _usual_parts(run: RunMeasured) -> dict[str, float]:
    """Return the mean seconds of a usual step by part; of all steps in files of older versions."""
    return {key: run.usual_parts.get(key, getattr(run, key) / run.steps) for key in _NAMES_OF_PARTS}


def _without_unusual(run: RunMeasured) -> str:
    """Return which steps do not count in the mean of the usual ones; nothing if all count."""
    if not run.unusual_steps:
        return ""
    first = min(run.unusual_steps, FIRST_STEPS)
    others = "" if run.unusual_steps == first else " and those that change masks"
    usual = run.steps - run.unusual_steps
    of = "one step" if usual == 1 else f"mean of {usual} steps"
    return f" ({of}, without the first {first}{others})"


def traffic(run: RunMeasured) -> str:
    """Return a sentence on the bytes streamed between store and engines per step."""
    return (
        f"{show_bytes(run.streamed_bytes / run.steps)} of weights were sent from the store to the "
        "engine, for the forward and again for the backward pass, and "
        f"{show_bytes(run.gradient_bytes / run.steps)} of gradients were returned once"
    )


def _summary(event: Finished, loss_unit: str) -> str:
    figures = {name: value for name, value in event.summary.items() if name != "peak_rss_bytes"}
    preparation = figures.pop("preparation_seconds", 0.0)
    if figures.get("steps", 0) < event.step:  # the others were done before a resume
        figures["steps"] = f"{event.step}, {figures['steps']} of them now"
    parts = []
    for name, value in figures.items():
        parts.append(_figure(name, value, loss_unit))
        if name == "seconds" and preparation >= _LONG_PREPARATION_SECONDS:
            parts.append(f"preparation before it {show_duration(preparation)}")
    return ", ".join(parts)


def _figure(name: str, value: Any, loss_unit: str) -> str:
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {show_bytes(value)}"
    if name == "seconds":
        return f"time {show_duration(value)}"
    shown = f"{value:.4f}" if isinstance(value, float) else f"{value}"
    if name.endswith("loss"):
        shown = show_loss(value, loss_unit)
    return f"{name.replace('_', ' ').replace('held out', 'held-out')} {shown}"
