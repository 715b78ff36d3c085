"""What is made of the seconds of loops that took turns: medians, ratios, a table."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from side_by_side.worker import Worker

LOSS_TOLERANCES = {"fp32": 1e-3, "bf16": 0.05}
"""By how much the losses of loops that do the same work may differ, in nats per token."""


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median over rounds of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def speeds_over(seconds: Mapping[str, Sequence[float]], reference: str) -> dict[str, float]:
    """Return, for each loop, the median of the reference's tokens/s over the loop's."""
    return {name: round(median_ratio(own, seconds[reference]), 3) for name, own in seconds.items()}


def greatest_difference(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the greatest absolute difference of two lists, place by place; NaN if one is NaN."""
    differences = [abs(a - b) for a, b in zip(some, others, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def check_losses(losses: Mapping[str, Sequence[float]], precision: str) -> float:
    """Return by how much loops that train the same model on the same batches differ at most.

    Args:
        losses: of all steps, by loop; the others are compared with the first.
        precision: `fp32` or `bf16`.

    Raises:
        SystemExit: rounding does not explain the difference, so the loops do different work.
    """
    (first, expected), *others = losses.items()
    differences = {name: greatest_difference(own, expected) for name, own in others}
    limit = LOSS_TOLERANCES[precision]
    for name, difference in differences.items():
        if not difference <= limit:  # also for NaN
            raise SystemExit(
                f"the losses of {name} and {first} in {precision} were expected to differ by at "
                f"most {limit}, got {difference:.2g}: {list(losses[name])} and {list(expected)}"
            )
    return max(differences.values())


def summarize(
    workers: Mapping[str, Worker], seconds: Mapping[str, Sequence[float]], tokens: int
) -> dict[str, dict[str, Any]]:
    """End the workers; return their last loss, median tokens/s and peak memory, each by loop.

    Args:
        tokens: of a step, the same for all.
    """
    result: dict[str, dict[str, Any]] = {
        name: {} for name in ("loss", "tokens_per_second", "peak_rss_gib")
    }
    for name, worker in workers.items():
        result["loss"][name] = worker.losses[-1]
        result["tokens_per_second"][name] = round(tokens / statistics.median(seconds[name]), 1)
        result["peak_rss_gib"][name] = round(worker.finish()["peak_rss_bytes"] / 2**30, 2)
    return result


def print_table(columns: Mapping[str, int], rows: Iterable[Sequence[str]]) -> None:
    """Print a table for people: the first column to the left, the others to the right.

    Args:
        columns: widths by heading.
        rows: the text of each cell.
    """
    widths = list(columns.values())
    for row in ([*columns], *rows):
        first, *others = (
            f"{cell:{w}}" if i == 0 else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        print(" ".join([first, *others]))
    sys.stdout.flush()  # a run that is cut short keeps its tables
