"""The view of a run in a terminal: a redrawn panel, and permanent lines above it."""

from rich.console import Console, RenderableType

from penstock.progress.log import event_lines
from penstock.progress.panel import panel
from penstock.progress.redrawn_lines import RedrawnLines
from penstock.progress.state import Progress
from penstock.progress.view import ALWAYS_SHOWN, View
from penstock.telemetry import Compiling, Evaluated, Event


class LiveView(View):
    """Redraws a panel of the run; evaluations and required messages stay above the panel."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress()
        self._message = ""
        self._lines = RedrawnLines(console, self.render)

    def open(self) -> None:
        self._message = ""
        self._lines.open()

    def close(self) -> None:
        self._message = ""
        self._lines.close(is_kept=self._progress.started is not None)

    def __call__(self, event: Event) -> None:
        self._progress = self._progress.after(event)
        if isinstance(event, (Evaluated, Compiling, *ALWAYS_SHOWN)):
            self._lines.print(
                "".join(f"{line}\n" for line in event_lines(event, self._progress.loss_unit))
            )

    def interrupt(self, text: str) -> None:
        """Show the text in the panel; its thread draws it, since a signal handler may not write."""
        self._message = text

    def render(self) -> RenderableType:
        """Return the current panel."""
        return panel(self._progress, self._message)
