"""The metrics of a run as TensorBoard event files, on request."""

import io
import os
import socket
import time
from pathlib import Path
from typing import Any, BinaryIO

from penstock.errors import ConfigError, StorageError, install_extra
from penstock.io import durable
from penstock.telemetry.events import Evaluated, Event, Finished, RunStarted, StepDone, Stopped


class TensorBoard:
    """Writes the metrics as TensorBoard event files into a folder. A listener for events.

    A value is in its file when the call returns. TensorBoard's own writer is not used: it writes in
    a thread, which prints a traceback if the disk is full.

    **Raises:** `StorageError` if the system refuses the write.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ConfigError(
                "logging.tensorboard: expected the package tensorboard, which is not installed; "
                f"{install_extra('tensorboard')}, or set logging.tensorboard to false"
            ) from error
        self._events, self._summaries, self._record_writer = event_pb2, summary_pb2, RecordWriter
        self._folder = folder
        self._file: BinaryIO | None = None
        self._newest = 0

    def __call__(self, event: Event) -> None:
        try:
            self._record(event)
        except OSError as error:
            raise StorageError(
                f"{self._folder}: cannot write the metrics for TensorBoard: {error.strerror}"
            ) from error

    def _record(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._open(event.resumed_from or 0)
        elif isinstance(event, StepDone):
            if event.step <= self._newest:  # repeated after a rollback of the store
                self._hide_from(event.step)
            self._newest = event.step
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
        """Close the file; another call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, resumed_from: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}.{os.getpid()}"
        # Unbuffered, so that closing the file writes nothing.
        self._file = (self._folder / name).open("xb", buffering=0)
        self._write(file_version="brain.Event:2")
        self._newest = resumed_from
        self._hide_from(
            resumed_from + 1
        )  # the rows of an interrupted run after its last checkpoint

    def _hide_from(self, step: int) -> None:
        """Make TensorBoard hide the earlier values of `step` and of the steps after it."""
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(session_log=start, step=step)

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        figures = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
        ]
        self._write(summary=self._summaries.Summary(value=figures), step=step)

    def _write(self, **fields: Any) -> None:
        assert self._file is not None
        record = io.BytesIO()
        event = self._events.Event(wall_time=time.time(), **fields)
        self._record_writer(record).write(event.SerializeToString())
        durable.write_all(self._file.fileno(), record.getbuffer())
