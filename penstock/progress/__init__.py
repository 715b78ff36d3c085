"""The views of a running run: in a terminal, in a notebook, in a log.

Views are made from events (`penstock.telemetry`) alone. The command line and the demo call
`view_for_command`; `Trainer` calls `view_from_python`. Both are loaded on first use, because
commands that show no run use the number formats and should start at once.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily
from penstock.progress.view import SilentView, View, show_on_stderr

if TYPE_CHECKING:
    from penstock.progress.choice import view_for_command, view_from_python
    from penstock.progress.cycles import cycle_lines, show_cycle_time
    from penstock.progress.figures import (
        show_bytes,
        show_count,
        show_dollars,
        show_duration,
        show_energy,
        show_flops,
        show_rate,
        show_shares,
        show_sparsity,
    )
    from penstock.progress.live import LiveView
    from penstock.progress.log import LineView, compared_lines, show_evaluation
    from penstock.progress.notebook import NotebookView

__all__ = [
    "LineView",
    "LiveView",
    "NotebookView",
    "SilentView",
    "View",
    "compared_lines",
    "cycle_lines",
    "show_bytes",
    "show_count",
    "show_cycle_time",
    "show_dollars",
    "show_duration",
    "show_energy",
    "show_evaluation",
    "show_flops",
    "show_on_stderr",
    "show_rate",
    "show_shares",
    "show_sparsity",
    "view_for_command",
    "view_from_python",
]

__getattr__ = lazily(
    __name__,
    {
        "LineView": "log",
        "LiveView": "live",
        "NotebookView": "notebook",
        "compared_lines": "log",
        "cycle_lines": "cycles",
        "show_cycle_time": "cycles",
        "show_bytes": "figures",
        "show_count": "figures",
        "show_dollars": "figures",
        "show_duration": "figures",
        "show_energy": "figures",
        "show_evaluation": "log",
        "show_flops": "figures",
        "show_rate": "figures",
        "show_shares": "figures",
        "show_sparsity": "figures",
        "view_for_command": "choice",
        "view_from_python": "choice",
    },
)
