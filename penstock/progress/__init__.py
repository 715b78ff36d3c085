"""What people see of a run while it goes on: in a terminal, in a notebook, in a log.

Everything here is made from events (`penstock.events`) alone. The command line and the demo choose
their view themselves; `Trainer` asks `view_from_python`.
"""

from penstock.progress.choice import view_for_command, view_from_python
from penstock.progress.live import LiveView
from penstock.progress.log import LineView
from penstock.progress.notebook import NotebookView
from penstock.progress.view import SilentView, View

__all__ = [
    "LineView",
    "LiveView",
    "NotebookView",
    "SilentView",
    "View",
    "view_for_command",
    "view_from_python",
]
