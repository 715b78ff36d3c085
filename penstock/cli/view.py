"""What a terminal or a log shows of a run, from its events alone.

`LiveView` redraws a panel in a terminal; `LineView` writes one line every few steps, for logs and
pipes. Both are listeners and context managers, and both print what must not be lost (evaluations,
notices, how to resume) as lines that stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.cli.figures import (
    show_bytes,
    show_count,
    show_duration,
    show_rate,
    show_shares,
    sparkline,
)
from penstock.events import (
    ClusterEvent,
    Evaluated,
    Event,
    Finished,
    Notice,
    RunMeasured,
    RunStarted,
    Saved,
    StepDone,
    Stopped,
)

# Speeds are means over this many steps: steady enough to read, quick enough to see a change.
_RECENT_STEPS = 20

# What a consumer's disk of 1 TB is rated for by most makers; others are rated in proportion.
RATED_TB = 600

_ALWAYS_TOLD = (Notice, ClusterEvent, RunMeasured, Stopped, Finished)


class View(Protocol):
    """A listener that owns the terminal while the run goes on."""

    def __call__(self, event: Event) -> None: ...

    def __enter__(self) -> View: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Progress:
    """What the views derive from events: recent speeds, time left, the loss so far."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        self.last: StepDone | None = None
        self.evaluated: Evaluated | None = None
        self.best: Evaluated | None = None
        self.saved: Saved | None = None
        self.losses: list[float] = []
        self._recent: deque[StepDone] = deque(maxlen=_RECENT_STEPS)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.started = event
        elif isinstance(event, StepDone):
            self.last = event
            self.losses.append(event.loss)
            self._recent.append(event)
        elif isinstance(event, Evaluated):
            self.evaluated = event
            self.best = event if event.best else self.best
        elif isinstance(event, Saved):
            self.saved = event

    @property
    def seconds_per_step(self) -> float:
        return sum(s.seconds for s in self._recent) / max(len(self._recent), 1)

    @property
    def tokens_per_second(self) -> float:
        return self._per_second(sum(s.tokens for s in self._recent))

    @property
    def streamed_per_second(self) -> float:
        return self._per_second(sum(s.streamed_bytes for s in self._recent))

    @property
    def seconds_left(self) -> float:
        if self.started is None or self.last is None:
            return float("inf")
        return (self.started.steps - self.last.step) * self.seconds_per_step

    def _per_second(self, amount: float) -> float:
        return amount / max(sum(s.seconds for s in self._recent), 1e-9)


class LineView:
    """Writes readable lines: one every `every` steps, and one per other event."""

    def __init__(self, console: Console, every: int, quiet: bool = False) -> None:
        self._console = console
        self._every = every
        self._quiet = quiet
        self._progress = Progress()

    def __enter__(self) -> LineView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def __call__(self, event: Event) -> None:
        self._progress(event)
        if isinstance(event, StepDone):
            steps = self._progress.started.steps if self._progress.started else 0
            due = event.step % self._every == 0 or event.step in (1, steps)
            if due and not self._quiet:
                self._print(step_line(self._progress))
        elif not self._quiet or isinstance(event, _ALWAYS_TOLD):
            for line in event_lines(event):
                self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """Redraws a panel of the run in a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress()
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=4, transient=False
        )

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def __call__(self, event: Event) -> None:
        self._progress(event)
        if isinstance(event, (Evaluated, *_ALWAYS_TOLD)):
            self._console.print("\n".join(event_lines(event)), markup=False, highlight=False)

    def render(self) -> RenderableType:
        """Return the panel as it stands now."""
        return panel(self._progress)


def panel(progress: Progress) -> RenderableType:
    """Return the panel of a run: loss, speed, time left, traffic, memory."""
    started, last = progress.started, progress.last
    if started is None:
        return Text("preparing ...")
    step = last.step if last else started.resumed_from or 0
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    bar = ProgressBar(total=started.steps, completed=step, width=40)
    table.add_row("step", _beside(bar, f"{step} / {started.steps}"))
    if last is not None:
        chart = sparkline(progress.losses, 40)
        table.add_row("loss", Text.assemble((f"{last.loss:.4f}", "bold"), "  ", (chart, "cyan")))
    if progress.evaluated is not None:
        best = progress.best or progress.evaluated
        table.add_row(
            "held-out loss",
            f"{progress.evaluated.loss:.4f}   best {best.loss:.4f} at step {best.step}"
            + show_shares(progress.evaluated.accuracy, progress.evaluated.exact_match),
        )
    if last is not None:
        table.add_row(
            "speed",
            f"{show_count(progress.tokens_per_second)} tokens/s   "
            f"{show_duration(progress.seconds_per_step)} per step   "
            f"{show_duration(progress.seconds_left)} left",
        )
        table.add_row(
            "stream",
            f"{show_rate(progress.streamed_per_second)}   "
            f"{show_bytes(last.streamed_bytes)} of weights out and "
            f"{show_bytes(last.gradient_bytes)} of gradients in per step",
        )
        clipped = f", clipped to {last.clip_scale:.2f} of it" if last.clip_scale < 0.995 else ""
        table.add_row(
            "update", f"rate {last.learning_rate:.3g}   gradient norm {last.grad_norm:.3g}{clipped}"
        )
        table.add_row("engine", _memory(last.engine_bytes, started.engine_bytes))
        table.add_row("store", _memory(last.store_bytes, started.state_bytes))
        if started.flash_bytes:
            table.add_row("flash", f"{show_bytes(started.flash_bytes)}   {flash_traffic(last)}")
    if progress.saved is not None:
        table.add_row("saved", f"step {progress.saved.step}, {show_bytes(progress.saved.bytes)}")
    title = f"[bold]{escape(started.model)}[/bold]  {parameters(started)}"
    subtitle = f"{escape(str(started.run_dir))}   {started.precision} on {escape(started.device)}"
    return Panel(table, title=title, subtitle=subtitle, expand=False)


def step_line(progress: Progress) -> str:
    """Return the line of the last step."""
    started, last = progress.started, progress.last
    assert last is not None
    of = f"/{started.steps}" if started else ""
    flash = f"flash {flash_traffic(last)}  " if last.flash_written_bytes else ""
    return (
        f"step {last.step}{of}  loss {last.loss:.4f}  rate {last.learning_rate:.3g}  "
        f"norm {last.grad_norm:.3g}  {show_count(progress.tokens_per_second)} tokens/s  "
        f"stream {show_rate(progress.streamed_per_second)}  "
        f"gradients {show_bytes(last.gradient_bytes)}  engine {show_bytes(last.engine_bytes)}  "
        f"{flash}left {show_duration(progress.seconds_left)}"
    )


def parameters(started: RunStarted) -> str:
    """Return the number of parameters, and how many are trained where that is not all."""
    trained = started.trainable_parameters
    part = f", {show_count(trained)} of them trained" if trained < started.parameters else ""
    return f"{show_count(started.parameters)} parameters{part}"


def flash_traffic(step: StepDone) -> str:
    """Return what a step read and wrote on flash, and what share of its time it waited."""
    share = step.flash_wait_seconds / step.seconds
    return (
        f"{show_bytes(step.flash_read_bytes)} read, {show_bytes(step.flash_written_bytes)} written "
        f"per step, {share:.0%} of the time waiting"
    )


def event_lines(event: Event) -> list[str]:
    """Return the lines that an event other than a step puts into a log."""
    if isinstance(event, RunStarted):
        resumed = f", resumed from step {event.resumed_from}" if event.resumed_from else ""
        store = show_bytes(event.state_bytes)
        if event.flash_bytes:
            store += f" of memory and {show_bytes(event.flash_bytes)} of flash"
        return [
            f"{event.model}: {parameters(event)}, {event.precision} on "
            f"{event.device}; {show_bytes(event.weight_bytes)} streamed per sweep, store "
            f"{store}, engine budget {show_bytes(event.engine_bytes)}",
            f"{event.steps} steps of {show_count(event.tokens_per_step)} tokens "
            f"({event.micro_batches} micro-batch{'es' if event.micro_batches > 1 else ''} of "
            f"{event.micro_batch}), "
            f"{event.recompute_stages} of {event.stages} stages recomputed, in "
            f"{event.run_dir}{resumed}",
        ]
    if isinstance(event, Evaluated):
        best = "  best so far" if event.best else ""
        shares = show_shares(event.accuracy, event.exact_match)
        perplexity = "" if event.perplexity is None else f"  perplexity {event.perplexity:.4g}"
        return [f"step {event.step}  held-out loss {event.loss:.4f}{perplexity}{shares}{best}"]
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
            return []  # a notice has said so
        return ["finished: " + _summary(event.summary)]
    return []


def measured_lines(run: RunMeasured) -> list[str]:
    """Return what bound a run, what it moved, and what that costs the disk."""
    parts = {
        "compute": run.compute_seconds,
        "waiting for flash": run.flash_wait_seconds,
        "weights and gradients": run.weight_seconds,
        "updates": run.update_seconds,
        "waiting for a checkpoint": run.snapshot_seconds,
    }
    shares = {name: seconds / run.step_seconds for name, seconds in parts.items()}
    shown = ", ".join(
        f"{name} {share:.0%}"
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
        if share >= 0.005
    )
    lines = [f"a step's time: {shown}"]
    if run.flash_rule_written_bytes:
        lines.append(
            f"flash per step: {show_bytes(run.flash_read_bytes / run.steps)} read (the rule: at "
            f"most {show_bytes(run.flash_rule_read_bytes / run.steps)}), "
            f"{show_bytes(run.flash_written_bytes / run.steps)} written (the rule: "
            f"{show_bytes(run.flash_rule_written_bytes / run.steps)})"
        )
    written = run.flash_written_bytes + run.checkpoint_bytes
    if written:
        per_day = written / run.seconds * 86400
        lines.append(
            f"disk: {show_bytes(written)} written; at this rate {per_day / 1e12:.2g} TB per day, "
            f"and a disk rated for {RATED_TB} TB written lasts "
            f"{show_duration(RATED_TB * 1e12 / per_day * 86400)}"
        )
    of = f" of {show_bytes(run.memory_bytes)} (memory)" if run.memory_bytes else ""
    lines.append(f"memory: the process had {show_bytes(run.peak_rss_bytes)}{of} at its peak")
    if run.memory_bytes and run.peak_rss_bytes > run.memory_bytes:
        lines.append(
            "note: that is more than `memory` allows; lower store.dram or engine.memory by the rest"
        )
    return lines


def _summary(summary: Mapping[str, Any]) -> str:
    return ", ".join(_figure(name, value) for name, value in summary.items())


def _figure(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {show_bytes(value)}"
    if name == "seconds":
        return f"time {show_duration(value)}"
    shown = f"{value:.4f}" if isinstance(value, float) else f"{value}"
    return f"{name.replace('_', ' ').replace('held out', 'held-out')} {shown}"


def _memory(used: int, budget: int) -> RenderableType:
    bar = ProgressBar(total=max(budget, 1), completed=min(used, budget), width=20)
    return _beside(bar, f"{show_bytes(used)} of {show_bytes(budget)}")


def _beside(bar: ProgressBar, text: str) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=bar.width)
    grid.add_column(no_wrap=True)
    grid.add_row(bar, text)
    return grid
