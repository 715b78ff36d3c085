"""How much of the time the links of a mesh are in use, in a simulated product."""

from pathlib import Path

from penstock.wafer import CoreParameters
from penstock.wafer_figures.heat_maps import draw_shares
from penstock.wafer_figures.simulated_case import Case

_EAST, _SOUTH, _CORE = 1, 2, 4  # of `MeshReport.link_occupancy`


def draw(path: Path, core: CoreParameters) -> None:
    """Draw the occupancy of the links on which two products send.

    Args:
        path: of the picture.
        core: parameters of the cores.
    """
    case = Case(spread=0.5)
    names = {
        "forward": ("east: entries", "south: sums", "to the core"),
        "weight gradient": ("east: entries, results", "south: rows of dY", "to the core"),
    }
    rows = {}
    for product, titles in names.items():
        report = case.simulate(product, core)
        sides = zip(titles, (_EAST, _SOUTH, _CORE), strict=True)
        rows[f"{product}, {report.cycles:,.0f} cycles"] = {
            title: report.link_occupancy[:, :, side] for title, side in sides
        }
    draw_shares(
        path,
        f"Simulated ({core.name} cores): links, {case}, features differ in their entries",
        "share of the cycles in use, % (mean of all cores above each map)",
        rows,
        from_zero=True,
    )
