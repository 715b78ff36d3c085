"""What every view has in common: a listener for events that owns its place while a run goes on."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from typing import Self

from penstock.telemetry import ClusterEvent, Event, Finished, Notice, RunMeasured, Stopped

# Events that are told whatever else is left out.
ALWAYS_TOLD = (Notice, ClusterEvent, RunMeasured, Stopped, Finished)


def show_on_stderr(text: str) -> None:
    """Write a line past all buffers, as a signal handler may: the step may take minutes.

    Where standard error is gone, nothing happens.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode(errors="backslashreplace"))


class View(ABC):
    """Shows a run; a context manager around it, which may be entered again."""

    @abstractmethod
    def __call__(self, event: Event) -> None:
        """Show what has happened."""

    @abstractmethod
    def interrupt(self, text: str) -> None:
        """Show that a stop was asked for; called from within a signal handler."""

    def open(self) -> None:  # noqa: B027 (a view that owns nothing opens nothing)
        """Begin to show a run."""

    def close(self) -> None:  # noqa: B027
        """Show what is left, and let go of the terminal."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SilentView(View):
    """Shows nothing: `Trainer(..., quiet=True)`."""

    def __call__(self, event: Event) -> None:
        """Ignore an event."""

    def interrupt(self, text: str) -> None:
        """Ignore that a stop was asked for; the caller hears of it from `train`."""
