"""The choice of a run's view: a panel in a terminal, a live line in a notebook, else log lines."""

import sys

from rich.console import Console

from penstock.progress.live import LiveView
from penstock.progress.log import LineView
from penstock.progress.notebook import NotebookView
from penstock.progress.view import SilentView, View


def view_for_command(console: Console, every: int, quiet: bool = False) -> View:
    """Return the view of a command that writes to `console`; `quiet` keeps notices."""
    if _can_redraw(console) and not quiet:
        return LiveView(console)
    return LineView(console, every, quiet)


def view_from_python(every: int, quiet: bool) -> View:
    """Return the view of a `Trainer` that a script or a notebook creates.

    The view writes to stderr, so stdout has only the output of the script. `quiet` shows nothing.
    """
    if quiet:
        return SilentView()
    if in_notebook():
        return NotebookView()
    console = Console(stderr=True)
    return LiveView(console) if _can_redraw(console) else LineView(console, every)


def in_notebook() -> bool:
    """Tell whether this process is a notebook's kernel; IPython in a terminal has no kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _can_redraw(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal and not console.legacy_windows
