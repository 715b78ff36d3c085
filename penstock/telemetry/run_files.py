"""Writing a run's figures into its folder, so that a disk that fails costs no step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.config import Config
from penstock.errors import StorageError
from penstock.telemetry.events import Event, Listener, RunStarted
from penstock.telemetry.metrics_writer import MetricsFile
from penstock.telemetry.tensorboard_files import TensorBoard


class RunFiles:
    """Passes events on to those who write them into the run's folder. A listener for events.

    Where one of them fails, the run is asked to stop, which saves it: a full disk under the figures
    costs no step. The error is kept as `failure`, and nothing more is written.
    """

    def __init__(self, listeners: Sequence[Listener], request_stop: Callable[[str], None]) -> None:
        self.failure: StorageError | None = None
        self._listeners, self._request_stop = listeners, request_stop

    def __call__(self, event: Event) -> None:
        for listener in self._listeners:
            if self.failure is not None:
                return
            try:
                listener(event)
            except StorageError as error:
                advice = "make room there, and give the same command to go on"
                if isinstance(event, RunStarted):  # nothing is done yet
                    raise StorageError(f"{error}; {advice}") from error
                self.failure = StorageError(f"{error}; the run was saved and stopped: {advice}")
                self._request_stop(str(error))


def open_run_files(config: Config, request_stop: Callable[[str], None]) -> RunFiles:
    """Return the listener that writes what a configuration asks for into its run's folder.

    Raises `ConfigError` at once if TensorBoard is asked for and not installed.
    """
    listeners: list[Listener] = [MetricsFile(config.run.dir / "metrics.jsonl")]
    if config.logging.tensorboard:
        listeners.append(TensorBoard(config.run.dir / "tensorboard"))
    return RunFiles(listeners, request_stop)
