"""A run in a terminal: a panel that is redrawn, and lines above it that stay."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, RenderableType

from penstock.events import Evaluated, Event
from penstock.progress.log import event_lines
from penstock.progress.panel import panel
from penstock.progress.redrawn import RedrawnLines
from penstock.progress.state import Progress
from penstock.progress.view import ALWAYS_TOLD


class LiveView:
    """Redraws a panel of the run; evaluations and what must be read stay above it."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress()
        self._message = ""
        self._lines = RedrawnLines(console, self.render)

    def __enter__(self) -> LiveView:
        self._message = ""
        self._lines.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._message = ""
        self._lines.__exit__(kind, error, trace)

    def __call__(self, event: Event) -> None:
        self._progress(event)
        if isinstance(event, (Evaluated, *ALWAYS_TOLD)):
            self._lines.print(
                "".join(f"{line}\n" for line in event_lines(event, self._progress.loss_unit))
            )

    def interrupt(self, text: str) -> None:
        """Show it in the panel, which another thread draws: a signal handler may not write here."""
        self._message = text

    def render(self) -> RenderableType:
        """Return the panel as it stands now."""
        return panel(self._progress, self._message)
