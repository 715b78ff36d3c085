"""Measures this host: every kind of work of a step on the processor, as a machine description."""

import contextlib
import datetime
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numba
import torch

from penstock.calibration.disk_cases import PIECE_BYTES, Disk, measured_disk
from penstock.calibration.disk_device import device_of
from penstock.calibration.host_key import KEY, HostKey
from penstock.calibration.kernel_compilation import compile_kernels
from penstock.calibration.link_cases import BOTH, MESSAGE, ProcessLinks, process_links
from penstock.calibration.overhead_cases import OPERATOR_CALL, STAGE_CALL
from penstock.calibration.processor_cases import host_products, processor_cases
from penstock.calibration.reference_step import STEP, ratios_in_step
from penstock.calibration.repetitions import (
    ENOUGH_REPETITIONS,
    Measured,
    OnProgress,
    Part,
    measure,
    repetition_counts,
)
from penstock.calibration.shared_cores import SHARED, competing_process
from penstock.calibration.sparse_cases import Choices
from penstock.config import ByteSize
from penstock.engine import (
    freed_pages_kept,
    set_threads,
    target_of,
)
from penstock.errors import ClusterError, ConfigError, StorageError
from penstock.machines import (
    FLASH_DEVICE,
    EnginePart,
    FlashPart,
    MachineDescription,
    ProcessesPart,
    RateCurve,
    StorePart,
)
from penstock.telemetry import process_memory
from penstock.user_folders import cache_folder

_CHOICES_SHARE = 0.25  # of the budget, for the choice of sparse products
_AT_ONCE_SHARE = 0.1  # of the budget and besides it, for processes that share the cores
_COMPILING = 0.6  # assumed share of the time, if kernels are compiled: some minutes
_ALONE = 0.8  # assumed share of the time of measurements that is spent before the second process
_DIGITS = 4  # of a rate: its spread is larger than the rest
_NO_CURVES = (OPERATOR_CALL, STAGE_CALL, STEP, "flash both", BOTH, MESSAGE, SHARED)


def calibrate(
    budget_seconds: float = 30,
    flash_dir: Path | None = None,
    on_progress: OnProgress = lambda text, share: None,
    notice: Callable[[str], None] = lambda text: None,
) -> MachineDescription:
    """Measure this host and return its description.

    Args:
        budget_seconds: of all measurements. What prepares them comes on top (`measuring_time`), and
            so do compiling kernels, at first use, and a second process that computes on the same
            cores. Everything is measured once, whatever the budget.
        flash_dir: a folder on the disk to measure; None: the cache folder, and no disk if no file
            can be written there.
        on_progress: called with what is being done, and the share of all that is done, which never
            decreases.
        notice: called with a sentence for the user about a part that was not measured.

    Raises:
        ConfigError: the budget is not above 0, or `flash_dir` is no folder.
        StorageError: the disk of `flash_dir` cannot be measured, or a disk fails later.
    """
    if not budget_seconds > 0:
        raise ConfigError(f"seconds: expected a number above 0, got {budget_seconds:g}")
    if flash_dir is not None and not flash_dir.is_dir():
        what = "which is not a folder" if flash_dir.exists() else "which does not exist"
        raise ConfigError(
            f"--flash-dir: expected a folder on the disk to measure, got {flash_dir}, {what}"
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_as_in_a_run())
        on_progress("writing a file to measure the disk", 0.0)
        folder = flash_dir or _existing(cache_folder())
        disk = _disk_of(stack, folder, is_wanted=flash_dir is not None, notice=notice)
        has_compiled = compile_kernels(_part_of(on_progress, 0.0, _COMPILING))
        begun = _COMPILING if has_compiled else 0.0
        alone = begun + _ALONE * (1 - begun)
        cases = list(processor_cases(Choices(_CHOICES_SHARE * budget_seconds)))
        if disk is not None:
            cases += disk.cases()
        links = _links_of(stack, notice)
        if links is not None:
            cases += links.cases()
        measured = measure(
            cases,
            budget_seconds,
            on_progress=_part_of(on_progress, begun, alone),
            on_lost=lambda part, error: notice(f"{error}; all other figures are kept"),
        )
        if _processes(measured) is not None:
            on_progress("starting a second process that computes", alone)
            seconds = _AT_ONCE_SHARE * budget_seconds
            measured += _measured_at_once(seconds, _part_of(on_progress, alone, 1.0), notice)
        flash = None if disk is None else _flash(measured, folder)
        sources = {"rates": _about_rates(measured, budget_seconds), KEY: str(HostKey.here())}
        sources["spread"] = _about_spread(measured)
        if disk is not None:
            sources["store.flash"] = _about_disk(disk, folder)
            sources[FLASH_DEVICE] = device_of(folder)
    return _description(measured, flash, _processes(measured), sources)


@contextlib.contextmanager
def _as_in_a_run() -> Iterator[None]:
    """Set threads and memory as an engine has them, and restore both at the end."""
    before = torch.get_num_threads(), numba.get_num_threads()
    set_threads(None)
    try:
        with freed_pages_kept(), torch.no_grad():
            yield
    finally:
        numba.set_num_threads(before[1])
        torch.set_num_threads(before[0])


def _disk_of(
    stack: contextlib.ExitStack, folder: Path, *, is_wanted: bool, notice: Callable[[str], None]
) -> Disk | None:
    try:
        return stack.enter_context(measured_disk(folder))
    except StorageError as error:
        if is_wanted:
            raise
        notice(f"the disk was not measured: {error}")
    return None


def _links_of(stack: contextlib.ExitStack, notice: Callable[[str], None]) -> ProcessLinks | None:
    try:
        return stack.enter_context(process_links())
    except ClusterError as error:
        notice(f"messages between processes were not measured: {error}")
    return None


def _part_of(on_progress: OnProgress, begin: float, end: float) -> OnProgress:
    """Return the progress of a part of the work, which is all between two shares of it."""
    return lambda text, share: on_progress(text, begin + (end - begin) * share)


def _measured_at_once(
    seconds: float, on_progress: OnProgress, notice: Callable[[str], None]
) -> list[Measured]:
    """Measure processes that share the cores, when everything else is measured: the other process
    would disturb it, and may fail."""
    try:
        with competing_process(host_products()) as competing:
            return measure([competing.case()], seconds, on_progress=on_progress)
    except ClusterError as error:
        notice(f"processes that share the cores were not measured: {error}")
    return []


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _description(
    measured: Sequence[Measured],
    flash: FlashPart | None,
    processes: ProcessesPart | None,
    sources: dict[str, str],
) -> MachineDescription:
    key = HostKey.here()
    alone = _alone(measured)
    engine = EnginePart(
        is_host=True,
        micro_batch_tokens=target_of("cpu").micro_batch_tokens,
        operator_seconds=_rounded(1 / alone[OPERATOR_CALL]),
        stage_seconds=_rounded(1 / alone[STAGE_CALL]),
        rates=curves(measured, "engine"),
    )
    seconds = {m.quantity.dtype: 1 / m.rate for m in measured if m.quantity.work == STEP}
    ratios = ratios_in_step(engine, host_products(), seconds)
    engine = engine.model_copy(
        update={f"{dtype}_in_step": _rounded(ratio) for dtype, ratio in ratios.items()}
    )
    store = StorePart(
        memory=ByteSize(process_memory.total_bytes()),
        cores=key.cores,
        rates=curves(measured, "store"),
        flash=flash,
    )
    return MachineDescription(
        name=platform.node() or "host",
        title=f"{key.processor}, {key.cores} cores, measured by penstock calibrate",
        kind="host",
        processor=key.processor,
        engine=engine,
        store=store,
        processes=processes,
        sources=sources,
    )


def _alone(measured: Sequence[Measured]) -> dict[str, float]:
    """Return the rates of the figures that are no curve, by work."""
    return {m.quantity.work: _rounded(m.rate) for m in measured if m.quantity.work in _NO_CURVES}


def curves(measured: Sequence[Measured], part: Part) -> tuple[RateCurve, ...]:
    """Return the curves of a part of the machine, in the order in which they were measured.

    The spread of a curve is the largest of its points.
    """
    points: dict[tuple[str, str, str], list[Measured]] = {}
    for one in measured:
        if one.quantity.part == part and one.quantity.work not in _NO_CURVES:
            quantity = one.quantity
            points.setdefault((quantity.work, quantity.dtype, quantity.layout), []).append(one)
    return tuple(
        RateCurve.model_validate(
            {
                "work": work,
                "dtype": dtype,
                "layout": layout,
                "sizes": [_rounded(one.size) for one in ordered],
                "rates": [_rounded(one.rate) for one in ordered],
                "spread": round(max(one.spread for one in ordered), 3),
            }
        )
        for (work, dtype, layout), found in points.items()
        if (ordered := sorted(found, key=lambda one: one.size))
    )


def _flash(measured: Sequence[Measured], folder: Path) -> FlashPart:
    found = os.statvfs(folder)
    return FlashPart(
        size=ByteSize(found.f_blocks * found.f_frsize),
        rates=curves(measured, "flash"),
        both=_alone(measured)["flash both"],
    )


def _processes(measured: Sequence[Measured]) -> ProcessesPart | None:
    alone, rates = _alone(measured), curves(measured, "processes")
    if not rates:
        return None
    return ProcessesPart(
        rates=rates,
        both=alone[BOTH],
        seconds=_rounded(1 / alone[MESSAGE]),
        at_once=_at_once(measured),
    )


def _at_once(measured: Sequence[Measured]) -> float | None:
    """Return how long two processes take that compute at once, over one after the other."""
    alone = [m.rate for m in measured if (m.quantity.work, m.quantity.dtype) == (STEP, "float32")]
    shared = [m.rate for m in measured if m.quantity.work == SHARED]
    return _rounded(alone[0] / shared[0]) if alone and shared else None


def _about_disk(disk: Disk, folder: Path) -> str:
    pieces = " and ".join(f"{size >> 20}" for size in PIECE_BYTES)
    if disk.is_direct:
        return f"the disk of {folder}, past the page cache, in pieces of {pieces} MiB"
    return (
        f"the file system of {folder} has no direct I/O: these are rates of the page cache, and "
        "those of its disk are lower"
    )


def _about_rates(measured: Sequence[Measured], budget_seconds: float) -> str:
    least, most = repetition_counts(measured)
    count = f"{least}" if least == most else f"{least} to {most}"
    text = f"penstock calibrate on {datetime.date.today()}: median of {count} repetitions"
    if least < ENOUGH_REPETITIONS:
        text += (
            f"; fewer than {ENOUGH_REPETITIONS} of some work: {budget_seconds:g} s were too short"
        )
    return text


def _about_spread(measured: Sequence[Measured]) -> str:
    """Name the spread of the figures that are no curve; that of a curve stands in the curve."""
    found = (f"{m.quantity} ±{m.spread:.1%}" for m in measured if m.quantity.work in _NO_CURVES)
    return f"half the range, relative to the median: {', '.join(found)}"


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
