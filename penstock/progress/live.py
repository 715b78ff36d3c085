"""The view of a run in a terminal: a redrawn panel, and permanent lines above it."""

import re
import textwrap

from rich.console import Console, RenderableType

from penstock.progress.log import event_lines
from penstock.progress.panel import panel
from penstock.progress.redrawn_lines import RedrawnLines
from penstock.progress.state import Progress
from penstock.progress.view import LASTING, View
from penstock.telemetry import Compiling, Evaluated, Event, Stopped

_SPACE = "\0"  # within a command while lines are divided


class LiveView(View):
    """Redraws a panel of the run; evaluations and notices stay above the panel."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress()
        self._message = ""
        self._lines = RedrawnLines(console, self.render)

    def open(self) -> None:
        self._message = ""
        self._lines.open()

    def close(self) -> None:
        self._message = ""
        if self._progress.started is None:
            self._lines.erase()
        else:
            self._lines.close()

    def __call__(self, event: Event) -> None:
        self._progress = self._progress.after(event)
        if isinstance(event, (Evaluated, Compiling, *LASTING)):
            lines = event_lines(event, self._progress.loss_unit)
            if not isinstance(event, Stopped):  # whose command is to be copied
                lines = [part for line in lines for part in self._parts(line)]
            self._lines.print("".join(f"{line}\n" for line in lines))

    def _parts(self, line: str) -> list[str]:
        """Divide a line between words, but not within a command, into parts that fit."""
        parts = textwrap.wrap(
            re.sub("`[^`]*`", lambda command: command[0].replace(" ", _SPACE), line),
            self._console.width,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        return [part.replace(_SPACE, " ") for part in parts]

    def interrupt(self, text: str) -> None:
        """Show the text in the panel; its thread draws it, since a signal handler may not write."""
        self._message = text

    def render(self) -> RenderableType:
        """Return the current panel."""
        return panel(self._progress, self._message)
