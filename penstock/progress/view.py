"""What every view has in common: a listener for events that owns its place while a run goes on."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType
from typing import Protocol

from penstock.events import ClusterEvent, Event, Finished, Notice, RunMeasured, Stopped

# Events that are told whatever else is left out.
ALWAYS_TOLD = (Notice, ClusterEvent, RunMeasured, Stopped, Finished)


def show_on_stderr(text: str) -> None:
    """Write a line past all buffers, as a signal handler may: the step may take minutes.

    Where standard error is gone, nothing happens.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode(errors="backslashreplace"))


class View(Protocol):
    """Shows a run; a context manager around it."""

    def __call__(self, event: Event) -> None: ...

    def interrupt(self, text: str) -> None:
        """Show that a stop was asked for; called from within a signal handler."""

    def __enter__(self) -> View: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class SilentView:
    """Shows nothing: `Trainer(..., quiet=True)`."""

    def __call__(self, event: Event) -> None:
        """Ignore an event."""

    def interrupt(self, text: str) -> None:
        """Ignore that a stop was asked for; the caller hears of it from `train`."""

    def __enter__(self) -> SilentView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None
