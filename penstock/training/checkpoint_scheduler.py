"""When a run is made to survive: begun after some steps, complete while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from penstock.config import CheckpointConfig
from penstock.errors import PenstockError
from penstock.store import SavedCheckpoint
from penstock.telemetry import Listener, Saved
from penstock.training.checkpoint_backends import CheckpointBackend

Extra = Callable[[], Mapping[str, Any]]


class CheckpointScheduler:
    """Begins and completes what a keeper does, one after the other, and tells of it.

    **Arguments:** `extra` gives what a resumed run needs to know beside the store, `tell` is told
    of every checkpoint, `saved_step` is the step that survives already.
    """

    def __init__(
        self,
        checkpoints: CheckpointBackend,
        config: CheckpointConfig,
        extra: Extra,
        tell: Listener,
        saved_step: int | None,
    ) -> None:
        self._checkpoints, self._config = checkpoints, config
        self._extra, self._tell = extra, tell
        self._saved_step = saved_step
        self._begun_at = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Tell whether it is time to begin, after `step`."""
        every, minutes = self._config.every, self._config.every_minutes
        if every is not None and step % every == 0:
            return True
        return minutes is not None and time.monotonic() - self._begun_at >= 60 * minutes

    def begin(self, step: int, best: bool = False) -> None:
        """Begin to make `step`, the last one committed, survive, behind what was begun before."""
        if self._saved_step == step and not best:
            return
        self.finish()
        self._checkpoints.begin_save(self._extra(), best)
        self._saved_step, self._begun_at = step, time.monotonic()

    def poll(self) -> None:
        """Tell of a checkpoint that has become complete; raise if it failed."""
        self._tell_saved(self._checkpoints.poll)

    def finish(self) -> None:
        """Return when the step that was begun survives."""
        self._tell_saved(self._checkpoints.finish)

    def save(self, step: int) -> None:
        """Make `step`, the last one committed, survive; what fails leaves nothing on its way."""
        try:
            self.begin(step)
            self.finish()
        except BaseException:
            self._checkpoints.abandon()
            raise

    def end(self, error: BaseException) -> None:
        """Leave no checkpoint on its way when the run ends with `error`, which stays what is told.

        After a failure it may still become complete; whoever interrupts does not wait for it.
        """
        try:
            if isinstance(error, Exception):
                self.finish()
        except BaseException as second:
            error.add_note(
                "the last checkpoint that was begun is not complete: "
                f"{str(second) or type(second).__name__}"
            )
        finally:
            self._checkpoints.abandon()

    def _tell_saved(self, get: Callable[[], SavedCheckpoint | None]) -> None:
        try:
            saved = get()
        except PenstockError:
            self._saved_step = None  # the next attempt begins anew
            raise
        if saved is not None:
            self._tell(Saved(saved.step, saved.folder, saved.seconds, saved.bytes))
