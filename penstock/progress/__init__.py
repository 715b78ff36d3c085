"""What people see of a run while it goes on: in a terminal, in a notebook, in a log.

Everything here is made from events (`penstock.telemetry`) alone. The command line and the demo ask
`view_for_command` for their view, `Trainer` asks `view_from_python`. Both are loaded on first use:
figures are also for commands that show no run and should start at once.
"""

from typing import TYPE_CHECKING, Any

from penstock.progress.view import SilentView, View, show_on_stderr

if TYPE_CHECKING:
    from penstock.progress.choice import view_for_command, view_from_python
    from penstock.progress.live import LiveView
    from penstock.progress.log import LineView
    from penstock.progress.notebook import NotebookView

__all__ = [
    "LineView",
    "LiveView",
    "NotebookView",
    "SilentView",
    "View",
    "show_on_stderr",
    "view_for_command",
    "view_from_python",
]

_MODULES = {
    "LineView": "log",
    "LiveView": "live",
    "NotebookView": "notebook",
    "view_for_command": "choice",
    "view_from_python": "choice",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"penstock.progress.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'penstock.progress' has no attribute {name!r}")
