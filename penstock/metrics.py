"""The run's figures on disk: `metrics.jsonl`, and TensorBoard files on request.

Each step stands in `metrics.jsonl` once: on resume, what the interrupted run wrote after its last
checkpoint is dropped, since those steps are done again.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from penstock import durable
from penstock.config import Config
from penstock.errors import ConfigError, StorageError
from penstock.events import (
    ClusterEvent,
    Evaluated,
    Event,
    Finished,
    Listener,
    RunMeasured,
    RunStarted,
    Saved,
    StepDone,
    Stopped,
    broadcast,
)


class MetricsFile:
    """Appends a JSON object per step, evaluation, checkpoint, event of a cluster, and run.

    A listener for events. Every line has `event` and `step`; a line is in the file, whole, when
    the call returns. NaN and infinity, which JSON lacks, are written as null.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._newest = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._newest = event.resumed_from or 0
            drop_after(self.path, self._newest)
        elif isinstance(event, StepDone):
            if event.step <= self._newest:  # made again: the store went back
                drop_after(self.path, event.step - 1)
            self._newest = event.step
            self._append("step", event)
        elif isinstance(event, Evaluated):
            self._append("evaluation", event)
        elif isinstance(event, Saved):
            self._append("checkpoint", event)
        elif isinstance(event, ClusterEvent):
            self._append("cluster", event)
        elif isinstance(event, RunMeasured):
            self._append("report", event)

    def _append(
        self, name: str, event: StepDone | Evaluated | Saved | ClusterEvent | RunMeasured
    ) -> None:
        line = json.dumps({"event": name} | {k: _plain(v) for k, v in vars(event).items()})
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot append metrics of step {event.step}: {error.strerror}; "
                "the run's checkpoints are not affected"
            ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file in order, without one that a crash cut short."""
    rows = []
    for line in _lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # A line that a crash tore, or that rotted: figures to look at, not state.
        if (
            isinstance(row, dict)
            and type(row.get("step")) is int
            and isinstance(row.get("loss", None), float | int | None)
        ):
            rows.append(row)
    return rows


def drop_after(path: Path, step: int) -> int:
    """Remove all lines of later steps, and torn ones; return how many lines were removed.

    What happened to a cluster stays: a step may be made again, but whoever was lost was lost.
    A crash leaves the file as it was or as it is to be.
    """
    lines = [line for line in _lines(path) if line]
    rows = read_metrics(path)
    kept = [row for row in rows if row["step"] <= step or row.get("event") == "cluster"]
    if len(kept) == len(lines):
        return 0
    durable.put_file(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
    return len(lines) - len(kept)


def _lines(path: Path) -> list[str]:
    if path.exists() and not path.is_file():
        raise StorageError(f"{path}: a file was expected here; move away what is there")
    return path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []


class TensorBoard:
    """Writes the same figures as TensorBoard event files into a folder. A listener for events."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "logging.tensorboard: expected the package tensorboard, which is not installed; "
                "run `pip install 'penstock[tensorboard]'` or set logging.tensorboard to false"
            ) from error
        self._make = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            # purge_step hides what an interrupted run wrote after its last checkpoint.
            self._writer = self._make(
                log_dir=str(self._folder), purge_step=(event.resumed_from or 0) + 1
            )
        elif isinstance(event, StepDone):
            self._scalars(
                event.step,
                {
                    "train/loss": event.loss,
                    "train/learning_rate": event.learning_rate,
                    "train/grad_norm": event.grad_norm,
                    "speed/tokens_per_second": event.tokens / event.seconds,
                    "traffic/streamed_bytes": event.streamed_bytes,
                    "traffic/gradient_bytes": event.gradient_bytes,
                    "memory/engine_bytes": event.engine_bytes,
                    "memory/store_bytes": event.store_bytes,
                },
            )
        elif isinstance(event, Evaluated):
            figures = {
                "evaluation/loss": event.loss,
                "evaluation/perplexity": event.perplexity,
                "evaluation/accuracy": event.accuracy,
                "evaluation/exact_match": event.exact_match,
            }
            self._scalars(event.step, {k: v for k, v in figures.items() if v is not None})
        elif isinstance(event, Stopped | Finished):
            self.close()

    def close(self) -> None:
        """Flush and close the files; calling it again does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)


def recorder(config: Config) -> Listener:
    """Return the listener that writes what a configuration asks for into its run's folder.

    Raises `ConfigError` at once if TensorBoard is asked for and not installed.
    """
    listeners: list[Listener] = [MetricsFile(config.run.dir / "metrics.jsonl")]
    if config.logging.tensorboard:
        listeners.append(TensorBoard(config.run.dir / "tensorboard"))
    return broadcast(listeners)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value
