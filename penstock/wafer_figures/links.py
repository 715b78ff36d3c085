"""How much of the time the links of a mesh are in use, in a simulated product."""

from __future__ import annotations

from pathlib import Path

from penstock.wafer import CoreParameters
from penstock.wafer_figures.heat_maps import draw_shares
from penstock.wafer_figures.simulated_case import Case

_EAST, _SOUTH, _CORE = 1, 2, 4  # of `MeshReport.link_occupancy`


def draw(path: Path, core: CoreParameters) -> None:
    """Draw the occupancy of the links on which the forward product sends.

    Args:
        path: of the picture.
        core: parameters of the cores.
    """
    case = Case()
    report = case.simulate("forward", core)
    links = {"to the east (entries)": _EAST, "to the south (sums)": _SOUTH, "to the core": _CORE}
    draw_shares(
        path,
        f"Simulated ({core.name} cores): links in forward, {case}; {report.cycles:,.0f} cycles",
        "share of the cycles in use, %",
        {name: report.link_occupancy[:, :, side] for name, side in links.items()},
    )
