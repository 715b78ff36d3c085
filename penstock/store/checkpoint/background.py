"""Writes a checkpoint in the background: a thread writes a snapshot while training continues."""

import threading
from pathlib import Path
from typing import Any

from penstock.store.checkpoint.base import Base
from penstock.store.checkpoint.save import SavedCheckpoint, write_checkpoint
from penstock.store.interface import OpenSnapshot


class BackgroundSave:
    """A checkpoint that is being written. It is complete and current once `wait` has returned.

    Args:
        snapshot: the state to save; closed when the save has succeeded or failed.
        checkpoints, extra, best, keep_last, base: as for `save_checkpoint`.
    """

    def __init__(
        self,
        snapshot: OpenSnapshot,
        checkpoints: Path,
        extra: dict[str, Any],
        *,
        best: bool = False,
        keep_last: int = 2,
        base: Base | None = None,
    ) -> None:
        self.step = snapshot.step
        self._snapshot = snapshot
        self._order = (checkpoints, extra, best, keep_last, base)
        self._saved: SavedCheckpoint | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="penstock saver", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return not self._thread.is_alive()

    def wait(self) -> SavedCheckpoint:
        """Return the checkpoint when it is current. All updates of its step must have been applied.

        Raises:
            PenstockError: an error of `save_checkpoint`; the previous checkpoint stays current.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._saved is not None
        return self._saved

    def abandon(self) -> None:
        """Abandon the checkpoint; return when all its files are removed."""
        self._snapshot.close()
        self._thread.join()

    def _write(self) -> None:
        import numba

        numba.set_num_threads(1)  # the others compute; a thread of one's own is a pool of its own
        checkpoints, extra, best, keep_last, base = self._order
        try:
            self._saved = write_checkpoint(
                self._snapshot, checkpoints, extra, best=best, keep_last=keep_last, base=base
            )
        except BaseException as error:  # raised by `wait`
            self._error = error
        finally:
            self._snapshot.close()
