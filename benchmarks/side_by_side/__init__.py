"""What benchmarks that compare loops share: worker processes that take turns, and their figures.

Only the standard library is imported here, so that a worker may run under another Python.
"""

from side_by_side.figures import (
    check_losses,
    greatest_difference,
    median_ratio,
    print_table,
    speeds_over,
    summarize,
)
from side_by_side.worker import Worker, WorkerEnded, peak_rss_bytes, serve, take_turns

__all__ = [
    "Worker",
    "WorkerEnded",
    "check_losses",
    "greatest_difference",
    "median_ratio",
    "peak_rss_bytes",
    "print_table",
    "serve",
    "speeds_over",
    "summarize",
    "take_turns",
]
