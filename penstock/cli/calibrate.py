"""`penstock calibrate`: measure this host, and show what was measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from penstock.calibration import HostKey
    from penstock.machines import MachineDescription, RateCurve

_LINE_SECONDS = 10.0
_TOKENS = ("attention", "head")  # work whose size is a number of tokens


def calibrate(
    seconds: Annotated[
        float,
        typer.Option(
            help="Time for all repetitions. Preparing them takes up to a minute more, and "
            "compiling kernels, at first use, some minutes."
        ),
    ] = 30,
    flash_dir: Annotated[
        Path | None,
        typer.Option(help="Folder on the disk to measure; default the user's cache folder."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Show the kept measurements; measure nothing.")
    ] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Earlier measurements no longer count.")
    ] = False,
) -> None:
    """Measure this host: products, memory, optimizer, disk, messages between processes.

    The medians of the last five measurements count: on a shared host, whose speed varies, measure
    again at other times. Rates of a disk are medians of those of them that measured the disk of the
    last one. Let nothing else run meanwhile. At most 512 MiB are written to the disk; nothing stays
    there. At the first use, kernels are compiled before that, on all cores, which takes some
    minutes.
    """
    from rich.console import Console

    from penstock.calibration import HostKey, busy_note, kept_file
    from penstock.errors import ConfigError

    if show and forget:
        raise ConfigError("--show and --forget: expected one of them; --forget measures again")
    key = HostKey.here()
    machine = _kept(key) if show else _measured(key, seconds, flash_dir, forget)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # A pipe has no width of its own to keep to.
    console.print(render(machine), *_notes(machine), sep="\n", highlight=False)
    console.print(f"kept in {kept_file(key)}", soft_wrap=True, highlight=False)
    if (note := busy_note(machine)) is not None:
        console.print(f"note: {note}", soft_wrap=True, highlight=False)


def _kept(key: HostKey) -> MachineDescription:
    from penstock.calibration import kept_file, kept_machine
    from penstock.errors import ConfigError, CorruptionError

    advice = "run `penstock calibrate` without --show to measure it"
    try:
        machine = kept_machine(key)
    except CorruptionError as error:
        raise CorruptionError(f"{error}; {advice} again") from None
    if machine is None:
        raise ConfigError(f"this host has no measurements at {kept_file(key)}; {advice}")
    return machine


def _measured(
    key: HostKey, seconds: float, flash_dir: Path | None, forgets: bool
) -> MachineDescription:
    from rich.console import Console

    from penstock.calibration import (
        calibrate as measure,
        keep,
        kept_machine,
        measuring_time,
        require_writable,
    )
    from penstock.planning import forget_choices

    require_writable(key)
    console = Console(stderr=True)
    untold = [measuring_time(seconds)]

    def tell(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    with _progress(console) as show:

        def on_progress(text: str, share: float) -> None:
            if untold:  # the arguments can be used
                tell(untold.pop())
            show(text, share)

        machine = measure(seconds, flash_dir, on_progress, tell)
    keep(machine, key, forgets=forgets)
    if forgets:
        forget_choices()
    return kept_machine(key) or machine


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, float], None]]:
    """Show a bar that disappears, on a terminal; elsewhere print a line now and then."""
    from rich.progress import BarColumn, Progress, TextColumn

    if not console.is_terminal:
        yield _Lines()
        return
    columns = BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("preparing", total=1.0)
        yield lambda text, share: bar.update(task, description=text, completed=share)


class _Lines:
    """Prints what is being done, at most every few seconds.

    **Arguments:** `clock` returns seconds, `write` prints a line.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = lambda text: typer.echo(text, err=True),
    ) -> None:
        self._clock, self._write = clock, write
        self._begun = self._last = clock()

    def __call__(self, text: str, share: float) -> None:
        now = self._clock()
        if now - self._last >= _LINE_SECONDS:
            self._last = now
            self._write(f"calibrate: {share:.0%} done after {now - self._begun:.0f} s; now {text}")


def render(machine: MachineDescription) -> Table:
    """Return a measured machine as a table with a line per curve."""
    from rich import box
    from rich.table import Table

    from penstock.calibration import curves_of
    from penstock.progress import show_bytes

    table = Table(
        title=f"{machine.title}; memory {show_bytes(machine.store.memory)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    for heading in ("work", "type", "sums over", "size of a call"):
        table.add_column(heading, overflow="fold")
    for heading in ("rate", "spread"):
        table.add_column(heading, justify="right", overflow="fold")
    for curve in curves_of(machine):
        table.add_row(*_row(curve))
    return table


def _row(curve: RateCurve) -> tuple[str, ...]:
    return (
        curve.work,
        "" if curve.dtype == "any" else curve.dtype,
        "" if curve.layout == "any" else curve.layout,
        _sizes(curve),
        _rates(curve),
        f"±{curve.spread:.2%}" if curve.spread <= 1 else "over ±100%",
    )


def _sizes(curve: RateCurve) -> str:
    from penstock.machines import IN_FLOPS
    from penstock.progress import show_bytes

    if curve.work == "sparse product":
        return ", ".join(f"{size:.0%}" for size in curve.sizes) + " kept"
    if curve.work in IN_FLOPS:
        unit = " tokens" if curve.work in _TOKENS else ""
        return ", ".join(f"{size:.0f}" for size in curve.sizes) + unit
    return ", ".join(show_bytes(size) for size in curve.sizes)


def _rates(curve: RateCurve) -> str:
    from penstock.machines import IN_FLOPS

    if curve.work in IN_FLOPS:
        return _in_one_unit(curve.rates, 1000, ("FLOP/s", "KFLOP/s", "MFLOP/s", "GFLOP/s"))
    return _in_one_unit(curve.rates, 1024, ("B/s", "KiB/s", "MiB/s", "GiB/s"))


def _in_one_unit(values: Sequence[float], base: int, units: Sequence[str]) -> str:
    """Return numbers in the unit that suits the largest."""
    scale, power = max(values), 0
    while scale >= base and power < len(units) - 1:
        scale, power = scale / base, power + 1
    return ", ".join(f"{value / base**power:.3g}" for value in values) + f" {units[power]}"


def _notes(machine: MachineDescription) -> list[str]:
    """Return the figures that are no curve, and where all come from."""
    from penstock.calibration import KEY
    from penstock.progress import show_bytes, show_rate

    engine, flash = machine.engine, machine.store.flash
    notes = [
        f"besides its work: {1e6 * engine.operator_seconds:.3g} us per call of an operator, "
        f"{1e6 * engine.stage_seconds:.3g} us per stage, micro-batch and sweep",
        "operators in a step take "
        f"{engine.in_step('float32'):.2f} (float32) and {engine.in_step('bfloat16'):.2f} "
        "(bfloat16) times as long as alone",
    ]
    if flash is not None:
        both = "" if flash.both is None else f"; {show_rate(flash.both)} reads and writes together"
        size = "" if flash.size is None else f" of {show_bytes(flash.size)}"
        notes.append(f"disk{size}{both}")
    if machine.processes is not None:
        rate, seconds = machine.processes.both, machine.processes.seconds
        together = "" if rate is None else f", {show_rate(rate)} both ways together"
        notes.append(f"between processes: {1e6 * seconds:.3g} us per short message{together}")
        if machine.processes.at_once is not None:
            notes.append(
                "processes that compute at once on all cores take "
                f"{machine.processes.at_once:.2f} times as long as one after the other"
            )
    accuracy = machine.accuracy
    if accuracy is not None:
        notes.append(
            f"nine of ten of the last {accuracy.runs} runs took {accuracy.low:g} to "
            f"{accuracy.high:g} of the predicted time per step ({accuracy.source})"
        )
    notes += [f"{name}: {text}" for name, text in machine.sources.items() if name != KEY]
    return notes
