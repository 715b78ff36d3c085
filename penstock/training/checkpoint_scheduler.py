"""The schedule of checkpoints: started after some steps, completed while training continues."""

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
    """Starts and completes checkpoints of a back end, one after the other, and reports them.

    **Arguments:** `extra` returns the resume state outside the store. `notify` is called with an
    event per checkpoint. `saved_step` is the step that is already durable.
    """

    def __init__(
        self,
        checkpoints: CheckpointBackend,
        config: CheckpointConfig,
        extra: Extra,
        notify: Listener,
        saved_step: int | None,
    ) -> None:
        self._checkpoints, self._config = checkpoints, config
        self._extra, self._notify = extra, notify
        self._saved_step = saved_step
        self._pending_step: int | None = None
        self._begun_at = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`."""
        every, minutes = self._config.every, self._config.every_minutes
        if every is not None and step % every == 0:
            return True
        return minutes is not None and time.monotonic() - self._begun_at >= 60 * minutes

    def begin(self, step: int, *, best: bool = False, again: bool = False) -> None:
        """Start to save `step`, the last committed step, after the pending checkpoint.

        A step that is saved already is saved once more only if it is the `best`, or if the state
        outside the store has changed and `again` says so.
        """
        if step in (self._saved_step, self._pending_step) and not (best or again):
            return
        self.finish()
        self._checkpoints.begin_save(self._extra(), best)
        self._pending_step, self._begun_at = step, time.monotonic()

    def poll(self) -> None:
        """Report a checkpoint that has become complete; raise its error if it failed."""
        self._report_saved(self._checkpoints.poll)

    def finish(self) -> None:
        """Return when the started checkpoint is durable."""
        self._report_saved(self._checkpoints.finish)
        self._pending_is_durable()  # the flash tier returns no checkpoint

    def save(self, step: int) -> None:
        """Save `step`, the last committed step; a failure leaves no pending checkpoint."""
        try:
            self.begin(step)
            self.finish()
        except BaseException:
            self._abandon()
            raise

    def end(self, error: BaseException) -> None:
        """Abandon or complete the pending checkpoint when the run ends with `error`.

        `error` remains the reported error. After a failure the pending checkpoint may still
        complete; after an interrupt it is abandoned.
        """
        try:
            if isinstance(error, Exception):
                self.finish()
        except BaseException as second:
            error.add_note(
                f"the last checkpoint is not complete: {str(second) or type(second).__name__}"
            )
        finally:
            self._abandon()

    def _abandon(self) -> None:
        self._checkpoints.abandon()
        self._pending_step = None  # the next attempt starts again

    def _pending_is_durable(self) -> None:
        if self._pending_step is not None:
            self._saved_step, self._pending_step = self._pending_step, None

    def _report_saved(self, get: Callable[[], SavedCheckpoint | None]) -> None:
        try:
            saved = get()
        except PenstockError:
            self._pending_step = None  # the next attempt starts again
            raise
        if saved is not None:
            self._pending_is_durable()
            self._notify(Saved(saved.step, saved.folder, saved.seconds, saved.bytes))
