"""The time and bytes of a run: summed over its events, reported once at its end."""

from __future__ import annotations

from penstock.store import FlashTraffic
from penstock.telemetry import process_memory
from penstock.telemetry.events import Event, RunMeasured, RunStarted, Saved, StepDone


class RunReport:
    """A listener for events that sums the costs of steps and checkpoints.

    **Arguments:** `limit_bytes` is the cap on the process's memory, if the run has one.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._started: RunStarted | None = None
        self._steps: list[StepDone] = []
        self._checkpoint_bytes = 0
        self._behind = FlashTraffic()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._started, self._steps, self._checkpoint_bytes = event, [], 0
        elif isinstance(event, StepDone):
            self._steps.append(event)
        elif isinstance(event, Saved):
            self._checkpoint_bytes += event.bytes

    def add_behind(self, traffic: FlashTraffic) -> None:
        """Count the flash traffic after the last step, which makes that step durable."""
        self._behind = traffic

    def measured(self, seconds: float) -> RunMeasured | None:
        """Return the totals of a run of this length; None if it executed no step."""
        steps, started, behind = self._steps, self._started, self._behind
        if not steps or started is None:
            return None
        return RunMeasured(
            step=steps[-1].step,
            steps=len(steps),
            seconds=seconds,
            step_seconds=sum(s.seconds for s in steps),
            compute_seconds=sum(s.compute_seconds for s in steps),
            flash_wait_seconds=sum(s.flash_wait_seconds for s in steps),
            weight_seconds=sum(s.weight_seconds for s in steps),
            update_seconds=sum(s.update_seconds for s in steps),
            snapshot_seconds=sum(s.snapshot_seconds for s in steps),
            flash_read_bytes=behind.read_bytes + sum(s.flash_read_bytes for s in steps),
            flash_written_bytes=self._behind.written_bytes
            + sum(s.flash_written_bytes for s in steps),
            flash_rule_read_bytes=started.flash_rule_read_bytes * len(steps),
            flash_rule_written_bytes=started.flash_rule_written_bytes * len(steps),
            checkpoint_bytes=self._checkpoint_bytes,
            peak_rss_bytes=process_memory.peak_resident_bytes(),
            memory_bytes=self._limit_bytes,
            streamed_bytes=sum(s.streamed_bytes for s in steps),
            gradient_bytes=sum(s.gradient_bytes for s in steps),
            flops=sum(s.flops for s in steps),
            sparsity=steps[-1].sparsity,
            predicted=started.predicted,
        )
