"""Which cores compute, wait for words, or wait for room, in a simulated product."""

from __future__ import annotations

from pathlib import Path

from penstock.wafer import CoreParameters
from penstock.wafer_figures.heat_maps import draw_shares
from penstock.wafer_figures.simulated_case import Case


def draw(path: Path, core: CoreParameters) -> None:
    """Draw the shares of the cycles in which each core is busy, starved and blocked.

    Args:
        path: of the picture.
        core: parameters of the cores.
    """
    case = Case()
    report = case.simulate("forward", core)
    states = {"busy": report.busy, "starved": report.starved, "blocked": report.blocked}
    draw_shares(
        path,
        f"Simulated ({core.name} cores): forward, {case}; {report.cycles:,.0f} cycles",
        "share of the cycles, %",
        {name: cycles / report.cycles for name, cycles in states.items()},
    )
