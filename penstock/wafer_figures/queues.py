"""What deeper queues are worth: simulated cycles over the words that a router's queue holds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.pictures import COLOURS, new_figure, save
from penstock.wafer import CoreParameters, Mesh
from penstock.wafer_figures.simulated_case import PRODUCTS, Case

_DEPTHS = (1, 2, 4, 8, 16)
_MANY: dict[str, Any] = {}  # those of `HIDDEN`
_FEW: dict[str, Any] = {"accumulators": 1, "broadcast_rows": 1}


def draw(path: Path, core: CoreParameters) -> None:
    """Draw the cycles of the three products over the depth of queues, with eight and with one sum
    or row that a core may hold.

    Args:
        path: of the picture.
        core: parameters of the cores, with any depth.
    """
    figure, axes = new_figure()
    case = Case(mesh=Mesh(16, 16), outputs=256, inputs=256, tokens=128)
    for product, colour in zip(PRODUCTS, COLOURS, strict=False):
        for options, style, held in ((_MANY, "o-", "8"), (_FEW, "s--", "1")):
            cycles = [
                case.simulate(product, replace(core, queue_words=depth), **options).cycles
                for depth in _DEPTHS
            ]
            axes.plot(_DEPTHS, cycles, style, color=colour, label=f"{product}, holding {held}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(_DEPTHS, [str(depth) for depth in _DEPTHS])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("words in a queue of a router")
    axes.set_ylabel("cycles")
    axes.set_title(f"Simulated ({core.name} cores): {case}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, title="sums or rows of dY", title_fontsize=8)
    save(figure, path)
