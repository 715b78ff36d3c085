"""The time and bytes of a run: summed over its events, reported once at its end."""

import statistics
from collections import Counter, deque

from penstock.store import FlashTraffic
from penstock.telemetry import process_memory
from penstock.telemetry.core_use import CoreUse
from penstock.telemetry.events import FIRST_STEPS, Event, RunMeasured, RunStarted, Saved, StepDone

_RECENT_STEPS = 1024  # of which the median is taken

_PARTS = (
    "compute_seconds",
    "flash_wait_seconds",
    "weight_seconds",
    "update_seconds",
    "snapshot_seconds",
)
_SUMMED = (
    *_PARTS,
    "streamed_bytes",
    "gradient_bytes",
    "flash_speculated_bytes",
    "flash_discarded_bytes",
    "flops",
)


class _Steps:
    """Some steps of a run: their number, the sums of their parts, and their recent durations."""

    def __init__(self) -> None:
        self.number = 0
        self._sums: Counter[str] = Counter()
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def add(self, step: StepDone) -> None:
        self.number += 1
        self._recent.append(step.seconds)
        for name in _PARTS:
            self._sums[name] += getattr(step, name)

    def median_seconds(self) -> float:
        return statistics.median(self._recent)

    def mean_parts(self) -> dict[str, float]:
        return {name: self._sums[name] / self.number for name in _PARTS}


class RunReport:
    """A listener for events that sums the costs of steps and checkpoints.

    **Arguments:** `limit_bytes` is the cap on the process's memory, if the run has one.
    `has_workers` tells whether it has other processes, which may be on this machine.
    """

    def __init__(self, limit_bytes: int | None, *, has_workers: bool = False) -> None:
        self._limit_bytes = None if limit_bytes is None else int(limit_bytes)
        self._has_workers = has_workers
        self._behind = FlashTraffic()
        self._begin(None)

    def _begin(self, started: RunStarted | None) -> None:
        self._started = started
        self._last: StepDone | None = None
        self._steps = 0
        self._sums: Counter[str] = Counter()
        # All steps; those after the first ones; those of them that change no mask.
        self._all, self._later, self._usual = _Steps(), _Steps(), _Steps()
        self._used_before: CoreUse | None = None  # when the first steps were done
        self._checkpoint_bytes = 0
        self._closed_form_cycles = self._simulated_cycles = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._begin(event)
        elif isinstance(event, StepDone):
            self._add(event)
        elif isinstance(event, Saved):
            self._checkpoint_bytes += event.bytes

    def _add(self, step: StepDone) -> None:
        self._last = step
        self._steps += 1
        self._all.add(step)
        if self._steps == FIRST_STEPS and not self._has_workers:
            self._used_before = CoreUse.now()
        if self._steps > FIRST_STEPS:
            self._later.add(step)
            if not step.changed_entries:
                self._usual.add(step)
        for name in ("seconds", "flash_read_bytes", "flash_written_bytes", *_SUMMED):
            self._sums[name] += getattr(step, name)
        if step.cycles is not None:
            self._closed_form_cycles += step.cycles.closed_form
            self._simulated_cycles += step.cycles.simulated

    def _core_shares(self) -> tuple[float, float]:
        """Return the shares of the cores that others took since the first steps; 0 if unknown."""
        return CoreUse.shares(self._used_before)

    def add_behind(self, traffic: FlashTraffic) -> None:
        """Count the flash traffic that follows the last step and makes it durable."""
        self._behind = traffic

    def measured(self, seconds: float) -> RunMeasured | None:
        """Return the totals of a run of this length; None if it executed no step."""
        last, started, behind, sums = self._last, self._started, self._behind, self._sums
        if last is None or started is None:
            return None
        others, stolen = self._core_shares()
        usual = next(kind for kind in (self._usual, self._later, self._all) if kind.number)
        return RunMeasured(
            step=last.step,
            steps=self._steps,
            seconds=seconds,
            step_seconds=sums["seconds"],
            usual_step_seconds=usual.median_seconds(),
            usual_parts=usual.mean_parts(),
            unusual_steps=self._steps - usual.number,
            flash_read_bytes=behind.read_bytes + sums["flash_read_bytes"],
            flash_written_bytes=behind.written_bytes + sums["flash_written_bytes"],
            flash_rule_read_bytes=started.flash_rule_read_bytes * self._steps,
            flash_rule_written_bytes=started.flash_rule_written_bytes * self._steps,
            checkpoint_bytes=self._checkpoint_bytes,
            peak_rss_bytes=process_memory.peak_resident_bytes(),
            memory_bytes=self._limit_bytes,
            others_share=others,
            stolen_share=stolen,
            sparsity=last.sparsity,
            predicted=started.predicted,
            closed_form_cycles=self._closed_form_cycles,
            simulated_cycles=self._simulated_cycles,
            clock_hz=0.0 if last.cycles is None else last.cycles.clock_hz,
            **{name: sums[name] for name in _SUMMED},
        )
