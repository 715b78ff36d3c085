"""The views of a running run: in a terminal, in a notebook, in a log.

Views are made from events (`penstock.telemetry`) alone. The command line and the demo call
`view_for_command`; `Trainer` calls `view_from_python`. Both are loaded on first use, because
commands that show no run use the number formats and should start at once.
"""

from typing import TYPE_CHECKING

from penstock.front_door import lazily
from penstock.progress.view import (
    SilentView as SilentView,
    View as View,
    show_on_stderr as show_on_stderr,
)

if TYPE_CHECKING:
    from penstock.progress.choice import (
        view_for_command as view_for_command,
        view_from_python as view_from_python,
    )
    from penstock.progress.cycles import (
        cycle_lines as cycle_lines,
        show_cycle_time as show_cycle_time,
    )
    from penstock.progress.figures import (
        show_bytes as show_bytes,
        show_count as show_count,
        show_dollars as show_dollars,
        show_duration as show_duration,
        show_energy as show_energy,
        show_flops as show_flops,
        show_rate as show_rate,
        show_shares as show_shares,
        show_sparsity as show_sparsity,
        unit_of_duration as unit_of_duration,
    )
    from penstock.progress.live import LiveView as LiveView
    from penstock.progress.log import (
        LineView as LineView,
        busy_lines as busy_lines,
        compared_lines as compared_lines,
        show_evaluation as show_evaluation,
    )
    from penstock.progress.notebook import NotebookView as NotebookView

__getattr__ = lazily(__name__, __file__)
