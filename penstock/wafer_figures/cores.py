"""Which cores compute, wait for words, or wait for room, in a simulated product."""

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
    case = Case(spread=0.5)
    rows = {}
    for name, is_sorted in (("sorted", True), ("not sorted", False)):
        report = case.simulate("forward", core, is_sorted=is_sorted)
        states = {"busy": report.busy, "starved": report.starved, "blocked": report.blocked}
        rows[f"{name}, {report.cycles:,.0f} cycles"] = {
            state: cycles / report.cycles for state, cycles in states.items()
        }
    draw_shares(
        path,
        f"Simulated ({core.name} cores): forward, {case}, features differ in their entries",
        "share of the cycles, % (mean of all cores above each map)",
        rows,
    )
