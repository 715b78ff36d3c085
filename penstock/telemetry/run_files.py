"""Writing of metrics into the run's folder; a failing disk costs no step."""

from collections.abc import Callable, Sequence

from penstock.config import Config
from penstock.errors import StorageError
from penstock.io import write_advice
from penstock.telemetry.events import Event, Listener, RunStarted
from penstock.telemetry.metrics_writer import MetricsFile
from penstock.telemetry.tensorboard_files import TensorBoard


class RunFiles:
    """Passes events to the writers of files in the run's folder. A listener for events.

    If a writer fails, the run is asked to stop and saves its state, so a full disk under the
    metrics costs no step. The error is kept as `failure`, and writing ends.
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
                remedy = write_advice(error.__cause__, "free space there")
                advice = f"{remedy}, then give the same command again to resume"
                if isinstance(event, RunStarted):  # no step is done yet
                    raise StorageError(f"{error}; {advice}") from error
                self.failure = StorageError(f"{error}; the run was saved and stopped: {advice}")
                self._request_stop(str(error))


def open_run_files(config: Config, request_stop: Callable[[str], None]) -> RunFiles:
    """Return the listener that writes the configured files into the run's folder.

    Raises `ConfigError` at once if TensorBoard is configured but not installed.
    """
    listeners: list[Listener] = [MetricsFile(config.run.dir / "metrics.jsonl")]
    if config.logging.tensorboard:
        listeners.append(TensorBoard(config.run.dir / "tensorboard"))
    return RunFiles(listeners, request_stop)
