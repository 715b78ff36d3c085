"""The interface of views: a listener for events that owns its output while a run is active."""

import contextlib
import os
from abc import ABC, abstractmethod
from typing import Self

from penstock.telemetry import ClusterEvent, Event, Finished, Notice, RunMeasured, Stopped

# Events whose lines stay, in every view that is not quiet.
LASTING = (Notice, ClusterEvent, RunMeasured, Stopped, Finished)
# Events that `penstock train --quiet` shows too: what a user may have to act on.
SHOWN_IF_QUIET = (Notice, ClusterEvent, Stopped)


def show_on_stderr(text: str) -> None:
    """Write a line without any buffer, as a signal handler may: the current step may take minutes.

    In a terminal it has a line of its own below the echoed `^C`. Nothing happens if standard error
    is closed.
    """
    with contextlib.suppress(OSError):
        begin = "\n" if os.isatty(2) else ""
        os.write(2, f"{begin}{text}\n".encode(errors="backslashreplace"))


class View(ABC):
    """Shows a run; a context manager around the run, which may be entered again."""

    @abstractmethod
    def __call__(self, event: Event) -> None:
        """Show an event."""

    @abstractmethod
    def interrupt(self, text: str) -> None:
        """Show that a stop was requested; called from a signal handler."""

    def open(self) -> None:  # noqa: B027 (a view that owns nothing opens nothing)
        """Start to show a run."""

    def close(self) -> None:  # noqa: B027
        """Show the remaining output, and release the terminal."""

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:  # Ctrl-C: the cursor may be hidden already
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SilentView(View):
    """Shows nothing: `Trainer(..., quiet=True)`."""

    def __call__(self, event: Event) -> None:
        """Ignore an event."""

    def interrupt(self, text: str) -> None:
        """Ignore that a stop was requested; the caller learns this from `train`."""
