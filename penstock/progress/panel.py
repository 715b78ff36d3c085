"""The panel of a run: at most 80 columns wide, a label and a value per row."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.progress.cycles import largest_stage_text, step_cycles_text
from penstock.progress.figures import (
    show_bar,
    show_bytes,
    show_count,
    show_duration,
    show_flops,
    show_rate,
    show_shares,
    sparkline,
)
from penstock.progress.log import (
    evaluating,
    flash_traffic,
    parameters,
    show_best,
    show_held_out_loss,
    show_loss,
    sparsity_of,
    time_left,
)
from penstock.progress.state import Progress
from penstock.telemetry import RunStarted, StepDone

_LABEL_WIDTH = len("held out")
_BAR_WIDTH = 20
_CHART_WIDTH = 36


def panel(progress: Progress, message: str = "") -> RenderableType:
    """Return the panel of the run's current state, with an urgent `message` below the steps."""
    started = progress.started
    if started is None:
        return Text("compiling kernels ..." if progress.is_compiling else "preparing ...")
    table = Table.grid(padding=(0, 2))
    # In a narrow terminal the value column shrinks: only a column that wraps can shrink.
    table.add_column(style="dim", no_wrap=True, min_width=_LABEL_WIDTH)
    table.add_column(overflow="fold")
    steps, *others = _rows(progress, started)
    urgent = [("", Text(message, "bold yellow"))] if message else []
    for label, value in (steps, *urgent, *others):
        table.add_row(label, value)
    title = f"[bold]{escape(started.model)}[/bold]  {parameters(started)}"
    subtitle = f"{escape(str(started.run_dir))}   {started.precision} on {escape(started.device)}"
    return Panel(table, title=title, subtitle=subtitle, expand=False)


def _rows(progress: Progress, started: RunStarted) -> Iterator[tuple[str, str | Text]]:
    last = progress.last
    step = last.step if last else started.resumed_from or 0
    resumed = f"   resumed from step {started.resumed_from}" if started.resumed_from else ""
    state = f"   {evaluating(progress)}" if progress.evaluating is not None else resumed
    if progress.is_compiling:
        state = "   compiling kernels"
    yield "step", _bar(step, started.steps, f"{step} / {started.steps}{state}")
    elapsed = f"{show_duration(progress.seconds_elapsed)} elapsed"
    yield "time", f"{elapsed}   {time_left(progress)}".rstrip()
    if progress.epochs is not None:
        seen = show_count(step * started.tokens_per_step)
        yield "data", f"epoch {progress.epochs:.2f}   {seen} {started.row_name} seen"
    if last is not None:
        chart = sparkline(progress.losses.means, _CHART_WIDTH)
        loss = show_loss(last.loss, started.loss_unit)
        yield "loss", Text.assemble((loss, "bold"), "  ", (chart, "cyan"))
    if progress.evaluated is not None:
        found = progress.evaluated
        yield "held out", show_held_out_loss(found)
        if found.accuracy is not None:
            yield "", show_shares(found.accuracy, found.exact_match).strip()
    if progress.best_loss is not None:
        yield "best", show_best(progress.best_loss, progress.best_step)
    if last is not None:
        yield from _step_rows(progress, started, last)
    if progress.saved is not None:
        yield "saved", f"step {progress.saved.step}, {show_bytes(progress.saved.bytes)}"


def _step_rows(
    progress: Progress, started: RunStarted, last: StepDone
) -> Iterator[tuple[str, str | Text]]:
    yield (
        "speed",
        f"{show_count(progress.tokens_per_second)} {started.row_name}/s   "
        f"{show_duration(progress.seconds_per_step)} per step",
    )
    yield (
        "stream",
        f"{show_rate(progress.streamed_per_second)}   {show_bytes(last.streamed_bytes)} of "
        f"weights, {show_bytes(last.gradient_bytes)} of gradients a step",
    )
    norm = f"gradient norm {last.grad_norm:.3g}"
    if last.clip_scale < 0.995:
        norm += f", clipped to {last.grad_norm * last.clip_scale:.3g}"
    yield "update", f"learning rate {last.learning_rate:.3g}   {norm}"
    if last.sparsity is not None:
        yield "sparsity", sparsity_of(progress)
        yield "", f"{show_flops(last.flops)}FLOP a step"
    if last.cycles is not None:
        yield "cycles", step_cycles_text(last.cycles)
        if last.cycles.stages:
            yield "", largest_stage_text(last.cycles)
    yield "engine", _memory(last.engine_bytes, started.engine_bytes)
    yield "store", _memory(last.store_bytes, started.state_bytes)
    if started.flash_bytes:
        yield "flash", f"{show_bytes(started.flash_bytes)}   {flash_traffic(last)}"


def _memory(used: int, budget: int) -> Text:
    return _bar(used, budget, f"{show_bytes(used)} of {show_bytes(budget)}")


def _bar(done: float, total: float, text: str) -> Text:
    full, empty = show_bar(done, total, _BAR_WIDTH)
    return Text.assemble((full, "cyan"), (empty, "dim"), "  ", text)
