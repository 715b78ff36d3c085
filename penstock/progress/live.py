"""A run in a terminal: a panel that is redrawn, and lines above it that stay."""

from __future__ import annotations

from rich.console import Console, RenderableType

from penstock.progress.log import event_lines
from penstock.progress.panel import panel
from penstock.progress.redrawn import RedrawnLines
from penstock.progress.state import Progress
from penstock.progress.view import ALWAYS_TOLD, View
from penstock.telemetry import Evaluated, Event


class LiveView(View):
    """Redraws a panel of the run; evaluations and what must be read stay above it."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress()
        self._message = ""
        self._lines = RedrawnLines(console, self.render)

    def open(self) -> None:
        self._message = ""
        self._lines.open()

    def close(self) -> None:
        self._message = ""
        self._lines.close()

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
